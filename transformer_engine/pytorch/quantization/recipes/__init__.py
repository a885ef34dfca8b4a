"""What a recipe means: formats, the quantizers of a product, their states for clients, and what the machine can do."""
