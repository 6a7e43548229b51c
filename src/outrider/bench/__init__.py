"""Experiments: tasks, timings, peers. What is compared is paired, alternated, warmed and seeded."""
