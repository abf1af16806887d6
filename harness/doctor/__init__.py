"""Whether a target, a drafter and predictors fit each other and the machine, from configs and tensor headers alone."""
