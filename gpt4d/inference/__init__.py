"""What uses a trained model: generation, chats and evaluation, on any plan."""
