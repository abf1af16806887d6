"""Training of the embedded models: target, EAGLE-3 drafter, expert predictor."""
