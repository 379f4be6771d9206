"""Model families: their torch-free descriptions, the registry, and one readable model file per family."""
