"""What several tests use: toy laws, tiny models, a simulated GPU, a browser."""
