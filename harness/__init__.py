"""ecospec.harness"""

if __name__ != "ecospec.harness":
    raise ImportError("import ecospec.harness, not harness (run: pip install -e .)")
