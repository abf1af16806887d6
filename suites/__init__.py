"""ecospec.suites"""

if __name__ != "ecospec.suites":
    raise ImportError("import ecospec.suites, not suites (run: pip install -e .)")
