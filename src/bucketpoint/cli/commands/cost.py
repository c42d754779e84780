"""`bucketpoint cost`: stored bytes, their price, and the remainder under a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, command
from bucketpoint.cli.options import run_argument

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.catalog.snapshot import Snapshot
    from bucketpoint.retention import Plan

LIST_PRICE = 0.023
"""Dollars for a GB-month: Amazon S3 Standard, us-east-1, first 50 TB (its pricing page, 2026)."""

TITLES = {
    "now": "now",
    "no_record": "of these without a record",
    "tombstoned": "of these with a tombstone",
    "what_if": "kept by the policy",
}


def _price(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    # Not `value >= 1e6`, which is False for NaN: JSON has no NaN and no infinity.
    if not value < 1e6:
        raise click.BadParameter(f"{value} is not a price below a million dollars")
    return value


price_option = click.option(
    "--price",
    type=click.FloatRange(min=0),
    callback=_price,
    default=LIST_PRICE,
    show_default=True,
    help="Price of storage, in dollars per GB and month.",
)


@command("cost")
@price_option
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
    others = [size_of(catalog, checkpoint.folder) for checkpoint in snapshot.unrecorded]
    planned = None
    if policy_file is not None:
        from bucketpoint.catalog.policy_file import read_policy
        from bucketpoint.retention import plan

        planned = plan(read_policy(policy_file), snapshot.rows())
    document = {"root": catalog.url, "price": price, **costs_of(snapshot, others, planned, price)}
    return CommandResult(document, _lines(document))


def costs_of(
    snapshot: Snapshot, unrecorded: Sequence[int], planned: Plan | None, price: float
) -> dict[str, dict[str, Any] | None]:
    """Return the number, the bytes and the price of the checkpoints that each of `TITLES` names.

    Args:
        unrecorded: bytes of the checkpoints without a record.
        planned: plan of a policy; None for no `what_if`.
        price: dollars for a GB and month.
    """
    going = snapshot.going()
    sizes = {record.name: sum(record.groups.values()) for record in snapshot.recorded}
    return {
        "now": _cost([*sizes.values(), *unrecorded], price),
        "no_record": _cost(unrecorded, price),
        "tombstoned": _cost([size for name, size in sizes.items() if name in going], price),
        # Checkpoints without a record are kept by every policy.
        "what_if": None if planned is None else _cost([*(row.bytes for row in planned.left()), *unrecorded], price),
    }


def _cost(sizes: Sequence[int], price: float) -> dict[str, Any]:
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
