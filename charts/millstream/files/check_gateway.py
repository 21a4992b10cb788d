"""What `helm test` runs: the gateway is ready, and what autoscalers read from it is a number for every alias.

check_gateway.py http://gateway:8080 alias...
"""

import json
import sys
import urllib.request


def read(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read()


def main(gateway, *aliases):
    read(f"{gateway}/readyz")
    print(f"{gateway} is ready")
    for alias in aliases:
        backlog = json.loads(read(f"{gateway}/internal/scale/{alias}"))["backlog_seconds"]
        if isinstance(backlog, bool) or not isinstance(backlog, (int, float)):
            sys.exit(f"{alias}: backlog_seconds is {backlog!r}, and autoscalers need a number")
        print(f"{alias}: {backlog} s of work wait")


main(*sys.argv[1:])
