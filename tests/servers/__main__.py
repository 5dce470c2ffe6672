"""Keep servers running until Ctrl-C: `eval` what this prints, then run the tests as often as you like."""

import argparse
import asyncio
import signal
import sys

from . import KINDS, ServerError, Servers


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.servers", description=__doc__)
    parser.add_argument("--names", default=",".join(KINDS), help="which servers, separated by commas (%(default)s)")
    parser.add_argument("--durable", action="store_true", help="wait for the disk, as in production")
    arguments = parser.parse_args()
    names = arguments.names.split(",")
    if unknown := set(names) - set(KINDS):
        parser.error(f"there is no {', '.join(unknown)}, only {', '.join(KINDS)}")

    async with Servers(names, durable=arguments.durable, private=True) as servers:
        for name, reason in servers.missing.items():
            print(f"{KINDS[name].title} is missing: {reason}", file=sys.stderr)
        for server in servers.values():
            print(f"{server.title} {server.version} is running", file=sys.stderr)
        for server in servers.values():
            print(f"export {server.variable()}={server.url}", flush=True)
        print("Ctrl-C ends them.", file=sys.stderr)

        told_to_end = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, told_to_end.set)
        await told_to_end.wait()


try:
    asyncio.run(main())
except ServerError as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    sys.exit(130)
