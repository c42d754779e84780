"""`bucketpoint cost`: stored bytes, their price, and the remainder under a policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, command
from bucketpoint.cli.options import run_argument

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog

LIST_PRICE = 0.023
"""Dollars for a GB-month: Amazon S3 Standard, us-east-1, first 50 TB (its pricing page, 2026)."""

TITLES = {
    "now": "now",
    "no_record": "of these without a record",
    "tombstoned": "of these with a tombstone",
    "what_if": "kept by the policy",
}


@command("cost")
@click.option(
    "--price",
    type=click.FloatRange(min=0),
    default=LIST_PRICE,
    show_default=True,
    help="Price of storage, in dollars per GB and month.",
)
@click.option(
    "--what-if",
    "policy_file",
    type=click.Path(exists=True, dir_okay=False),
    help="Policy file. Show also the size and cost of the checkpoints that the policy would keep.",
)
@run_argument
def cost(catalog: Catalog, price: float, policy_file: str | None) -> CommandResult:
    """Show the size and the monthly cost of a run's checkpoints.

    With --what-if, also those of the checkpoints that a policy leaves. Sizes come from the records, by three listings,
    and by one more listing for each checkpoint without a record. Not counted are remains of dead saves (see gc), and
    older versions that a versioned bucket keeps.
    """
    from bucketpoint.catalog.survey import size_of, survey

    snapshot = survey(catalog)
    going = snapshot.going()
    others = [size_of(catalog, checkpoint.folder) for checkpoint in snapshot.unrecorded]
    sizes = {(record.folder, record.id): sum(record.groups.values()) for record in snapshot.recorded}
    document: dict[str, Any] = {
        "root": catalog.url,
        "price": price,
        "now": taken_by([*sizes.values(), *others], price),
        "no_record": taken_by(others, price),
        "tombstoned": taken_by([size for key, size in sizes.items() if key in going], price),
        "what_if": None,
    }
    if policy_file is not None:
        from bucketpoint.catalog.policy_file import read_policy
        from bucketpoint.retention import plan

        left = plan(read_policy(policy_file), snapshot.rows()).left()
        # Checkpoints without a record are kept by every policy.
        document["what_if"] = taken_by([*(row.bytes for row in left), *others], price)
    return CommandResult(document, _lines(document))


def taken_by(sizes: list[int], price: float) -> dict[str, Any]:
    total = sum(sizes)
    return {"checkpoints": len(sizes), "bytes": total, "dollars_a_month": round(total / 1e9 * price, 2)}


def _lines(document: dict[str, Any]) -> Iterator[str]:
    rows = []
    for name, title in TITLES.items():
        part = document[name]
        if part and (name != "no_record" or part["checkpoints"]):
            money = f"${part['dollars_a_month']:,.2f} a month"
            rows.append((title, text.count(part["checkpoints"], "checkpoint"), text.size(part["bytes"]), money))
    yield from text.table(rows, indent=0)
    yield f"at ${document['price']} a GB-month"
