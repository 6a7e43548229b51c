"""A server of OpenAI's completions and chat completions around `ContinuousBatch`: what is asked, done, and answered."""
