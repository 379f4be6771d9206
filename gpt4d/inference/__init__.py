"""Commands that use a trained model: generation, chats and evaluation, on any plan."""
