"""Two runs of the same prompts side by side: deterministic figures, timings, and what of them is a regression."""
