"""The style sheet of the page: light and dark, for a phone as for a large window."""

from __future__ import annotations

STYLE = """
:root {
  --ground: #f6f7f9; --card: #ffffff; --ink: #1d2430; --quiet: #5b6573; --line: #dfe3e8;
  --kept: #2166b0; --going: #8a93a0; --live: #127a6c; --dead: #c2372e; --warn: #8a5300; --warn-ground: #fdf3df;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0f141b; --card: #171e27; --ink: #e5e9ee; --quiet: #9aa6b4; --line: #2c3643;
    --kept: #6aaef0; --going: #717c8a; --live: #4cc3b0; --dead: #f0786e; --warn: #f0c36b; --warn-ground: #2b2413;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 56px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 0 0 12px; }
h3 { font-size: 14px; margin: 20px 0 4px; }
p { margin: 0 0 10px; }
.axis + p, .legend + p { margin-top: 10px; }
.quiet, .axis, .top { color: var(--quiet); font-size: 13px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin-top: 18px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.tile b { display: block; font-size: 24px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.warn { background: var(--warn-ground); border-color: var(--warn); color: var(--warn); }
ul { margin: 0; padding-left: 20px; }
.damaged { color: var(--dead); font-weight: 600; }
.whole { color: var(--live); }
.chart { display: block; width: 100%; height: 132px; overflow: visible; }
.chart path { vector-effect: non-scaling-stroke; fill: none; }
.base { stroke: var(--line); stroke-width: 1; }
.save { stroke-width: 4; }
.save.kept { stroke: var(--kept); } .save.going { stroke: var(--going); }
.save.live { stroke: var(--live); } .save.dead { stroke: var(--dead); }
.chart .area { fill: var(--kept); opacity: 0.15; }
.stored { stroke: var(--kept); stroke-width: 2; }
.ahead { stroke: var(--kept); stroke-width: 2; stroke-dasharray: 5 4; }
.now { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 2 3; }
.axis { display: flex; justify-content: space-between; gap: 12px; margin-top: 6px; font-variant-numeric: tabular-nums; }
.axis span:last-child { text-align: right; }
.axis span:only-child { margin: 0 auto; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 10px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; }
i.kept { background: var(--kept); } i.going { background: var(--going); }
i.live { background: var(--live); } i.dead { background: var(--dead); }
.plan svg { display: block; width: 100%; height: auto; }
.strips { display: none; }
.strips p { margin: 12px 0 2px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-size: 13px; font-weight: 500; color: var(--quiet); }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
.number { text-align: right; white-space: nowrap; }
.nowrap { white-space: nowrap; }
.words { min-width: 170px; }
tr.goes td { color: var(--quiet); }
footer { margin-top: 24px; }
@media (max-width: 720px) {
  main { padding: 18px 12px 40px; }
  section { padding: 14px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .tile { padding: 10px 12px; }
  .tile b { font-size: 20px; }
  .plan { display: none; }
  .strips { display: block; }
  .strips svg { display: block; width: 100%; height: auto; }
  thead { display: none; }
  tr { display: block; padding: 10px 0; border-bottom: 1px solid var(--line); }
  tbody tr:last-child { border-bottom: 0; }
  td { display: grid; grid-template-columns: 92px 1fr; border: 0; padding: 1px 0; }
  td:empty { display: none; }
  td[data-label=""] { display: block; font-weight: 600; }
  td::before { content: attr(data-label); color: var(--quiet); font-size: 13px; }
  .number { text-align: left; }
  .nowrap { white-space: normal; }
}
@media print { section, .tile { break-inside: avoid; } body { background: none; } }
"""
