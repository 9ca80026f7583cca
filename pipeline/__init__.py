"""The offline half: example code → corpus → analyze → plan → capture → catalogue."""
