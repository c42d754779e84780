"""`bucketpoint overview`: stored bytes and their price, and the page that describes a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import Access, CommandResult, command, write_file
from bucketpoint.cli.commands.ls import observed
from bucketpoint.cli.commands.verify import one_of_many
from bucketpoint.cli.commands.watch import document_of
from bucketpoint.cli.options import progress_option, run_and_policy, trusted_option

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.catalog.snapshot import Snapshot
    from bucketpoint.retention import Plan, RetentionPolicy

LIST_PRICE = 0.023
"""Dollars for a GB-month: Amazon S3 Standard, us-east-1, first 50 TB (its pricing page, 2026)."""

LIST_PRICE_OF_WRITES = 0.005
"""Dollars for 1,000 requests that write: Amazon S3 Standard, us-east-1 (its pricing page, 2026)."""

_MONTH_S = 30 * 24 * 3600
_REQUESTS_BESIDES_DATA = 3
"""Requests of a fresh save besides those for data: docs/saving.md."""

_TITLES = {
    "now": "now",
    "no_record": "of these without a record",
    "tombstoned": "of these waiting to be deleted",
    "what_if": "kept by the policy",
}


def _price(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    # Not `value >= 1e6`, which is False for NaN: JSON has no NaN and no infinity.
    if not value < 1e6:
        raise click.BadParameter(f"{value} is not a price below a million dollars")
    return value


@command("overview")
@click.option("--html", "file", type=click.Path(dir_okay=False), metavar="FILE", help="Write a page to this HTML file.")
@click.option(
    "--price",
    type=click.FloatRange(min=0),
    callback=_price,
    default=LIST_PRICE,
    show_default=True,
    help="Price of storage, in dollars per GB and month.",
)
@click.option(
    "--request-price",
    type=click.FloatRange(min=0),
    callback=_price,
    default=LIST_PRICE_OF_WRITES,
    show_default=True,
    help="Price of 1,000 requests that write, in dollars.",
)
@click.option("--verify", is_flag=True, help="Re-read every byte of every checkpoint, as `verify --all` does.")
@trusted_option
@progress_option
@run_and_policy
def overview(
    catalog: Catalog,
    policy: RetentionPolicy | None,
    access: Access,
    file: str | None,
    price: float,
    request_price: float,
    verify: bool,
    trusted: bool,
    progress: bool | None,
) -> CommandResult:
    """Show what a run's checkpoints cost, or write a page about it.

    Shows the size and the monthly cost of the checkpoints and, with --policy, of those that the policy would keep, and
    the cost of requests at the rate and size of the last saves. Remains of dead saves (see gc) and old versions in a
    versioned bucket are not counted. The page also shows all checkpoints, saves that did not commit, and what is kept
    and why. It loads nothing from elsewhere. Sends the requests of `watch`, and, for the page, one small read for each
    pin. Exits with 1 if --verify finds damage.
    """
    from bucketpoint.catalog.deletion.prune import judged
    from bucketpoint.stores.local import LocalStore
    from bucketpoint.stores.redact import clean

    observation = observed(catalog)
    snapshot = observation.snapshot
    described = document_of(catalog, policy, observation, shown=None)
    plan: Plan | None = judged(policy, snapshot.rows())[0] if policy is not None else None
    costs = _costs(snapshot, plan, price)
    # Requests to a local folder cost nothing.
    local = isinstance(catalog.store, LocalStore)
    requests = None if local else _requests(described["newest"], described["interval_s"], request_price)
    rows = [
        (_TITLES[name], part["checkpoints"], part["bytes"], part["dollars_a_month"])
        for name, part in costs.items()
        if part is not None and (part["checkpoints"] or name in ("now", "what_if"))
    ]
    title = clean(catalog.url)
    described["arguments"] = described["arguments"].replace(catalog.url, title)
    verified: list[tuple[str, bool, list[str]]] = []
    for row in described["checkpoints"] if verify else ():
        ok, _, lines = one_of_many(access.at(row["url"]), trusted=trusted, progress=progress)
        # The last line, the verdict, begins with the checkpoint's URL.
        verified.append((row["url"], ok, [line.replace(catalog.url, title) for line in (lines[-1], *lines[:-1])]))
    if file is not None:
        from bucketpoint.catalog.notes import reason_and_author
        from bucketpoint.cli.page import page

        held = [(pin.step, *reason_and_author(catalog, pin)) for pin in snapshot.notes.pins]
        content = page(title, described, rows, price, held, plan, verified if verify else None)
        write_file(file, content, "page")
    whole = sum(ok for _, ok, _ in verified)
    document = {
        "root": catalog.url,
        "html": file,
        "price": price,
        **(costs["now"] or {}),
        **costs,
        "requests": requests,
        "attempts": len(described["attempts"]),
        "problems": described["problems"],
        "verified": {"whole": whole, "damaged": len(verified) - whole} if verify else None,
    }
    damage = [line for _, ok, lines in verified if not ok for line in lines]
    said = [*_cost_lines(rows, price), *_request_lines(requests, request_price), *damage, *_lines(document)]
    return CommandResult(document, said, whole == len(verified))


def _costs(snapshot: Snapshot, planned: Plan | None, price: float) -> dict[str, dict[str, Any] | None]:
    """Return the number, the bytes and the price of the checkpoints that each of `_TITLES` names."""
    going = snapshot.going()
    sizes = {record.name: sum(record.groups.values()) for record in snapshot.recorded}
    unrecorded = [sum(one.groups.values()) for one in snapshot.unrecorded]
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


def _requests(newest: Mapping[str, Any] | None, interval_s: float | None, price: float) -> dict[str, Any] | None:
    """Return the requests of a save like the newest one, and their price a month at the pace of the last saves.

    None if the newest record has no number of objects, or if there is no second save. Assumes objects of one size, sent
    with the default options.
    """
    from bucketpoint.stores.http_store import CAPABILITIES
    from bucketpoint.transfer import TransferOptions
    from bucketpoint.transfer.pieces import common_part_bytes, plan_parts

    if not newest or not newest["objects"] or not interval_s:
        return None
    options, size = TransferOptions(), -(-newest["bytes"] // newest["objects"])
    parts = plan_parts(size, common_part_bytes([size], options), CAPABILITIES).count
    writes = 1 if size <= options.single_put_bytes else parts + 2
    each, saves = newest["objects"] * writes + _REQUESTS_BESIDES_DATA, round(_MONTH_S / interval_s)
    return {"a_save": each, "saves_a_month": saves, "dollars_a_month": round(each * saves / 1000 * price, 2)}


def _request_lines(requests: Mapping[str, Any] | None, price: float) -> Iterator[str]:
    if requests is not None:
        yield (
            f"{requests['saves_a_month']:,} saves a month of {requests['a_save']:,} requests each: "
            f"${requests['dollars_a_month']:,.2f} a month at ${price} for 1,000"
        )


def _cost_lines(rows: Sequence[tuple[str, int, int, float]], price: float) -> Iterator[str]:
    yield from text.table(
        [
            (title, text.count(number, "checkpoint"), text.size(nbytes), f"${dollars:,.2f} a month")
            for title, number, nbytes, dollars in rows
        ],
        indent=0,
    )
    yield f"at ${price} a GB-month"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"PROBLEM: {problem}" for problem in document["problems"])
    verified = document["verified"]
    if verified is not None:
        number = verified["whole"] + verified["damaged"]
        yield f"{verified['whole']} of {text.count(number, 'checkpoint')} {text.are(verified['whole'])} whole"
    if document["html"] is not None:
        yield f"page written to {document['html']}"
