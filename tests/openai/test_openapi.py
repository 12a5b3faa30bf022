#!/usr/bin/env python3
"""Holds `/openapi.json` of a running Tutti server against the specification of OpenAPI 3.1.

    TUTTI_BASE_URL=http://127.0.0.1:8000/v1 python tests/openai/test_openapi.py

What it says of requests and answers is tests/http's matter. Exits 1 with the failed check on the
first failure.
"""

import json
import os
import sys
import urllib.request

from openapi_spec_validator import OpenAPIV31SpecValidator

import test_openai_client as base
from test_openai_client import CheckFailed, check, equal


def wrong(document):
    """The first finding, or None."""
    return next(iter(OpenAPIV31SpecValidator(document).iter_errors()), None)


def checks(base_url):
    address = base_url.removesuffix("/v1") + "/openapi.json"
    with urllib.request.urlopen(address, timeout=60) as response:
        equal(response.headers["content-type"], "application/json", "content-type")
        document = json.load(response)
    equal(document["openapi"], "3.1.0", "openapi")
    found = wrong(document)
    check(found is None, f"it is not valid: {found}")
    # The validator does look.
    response = {"get": {"responses": {"200": {}}}}
    spoilt = {"openapi": "3.1.0", "info": document["info"], "paths": {"/": response}}
    check(wrong(spoilt) is not None, "a missing description goes unnoticed")


def main():
    try:
        checks(os.environ.get("TUTTI_BASE_URL", "http://127.0.0.1:8000/v1"))
    except CheckFailed as failure:
        print(f"openapi: FAILED after {base.passed} checks: {failure}")
        return 1
    print(f"openapi: {base.passed} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
