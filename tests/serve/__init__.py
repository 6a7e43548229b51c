"""The server: requests, answers, clients that come and go."""
