"""Imported once by the fork server, so that children start in milliseconds. NIXL and Ray are not: they start
threads."""

import mx_rl.publisher
import mx_rl.subscriber  # noqa: F401
