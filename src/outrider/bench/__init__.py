"""Experiments: tasks, timings, peers. Everything here is paired, alternated, warmed and seeded."""
