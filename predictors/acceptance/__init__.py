"""How likely the target is to accept each draft token: estimators, their files and their fitting."""
