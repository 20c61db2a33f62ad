"""Load on any OpenAI-compatible server, and what it made of it. Knows HTTP and the planner only."""
