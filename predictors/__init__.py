"""ecospec.predictors"""

if __name__ != "ecospec.predictors":
    raise ImportError("import ecospec.predictors, not predictors (run: pip install -e .)")
