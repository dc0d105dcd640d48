"""How the page looks: one sheet, light and dark by the reader's own setting."""

STYLE = """\
:root {
  color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1d2129; --soft: #5c6470; --line: #e2dfd9; --code: #f4f2ee;
  --gone: #fdeceb; --gone-mark: #f5b8b3; --came: #e7f5ea; --came-mark: #a5dbb0; --accent: #2f5fd0;
  --good: #1f7a3d; --warn: #a15c00; --bad: #b3261e; --on-kind: #ffffff;
  --k0: #2f6fb5; --k1: #b4541a; --k2: #2d7d4f; --k3: #8a4fa3; --k4: #a0392f; --k5: #2b7f86; --k6: #8a6d10;
  --k7: #5b5fc7;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171c; --card: #1c2027; --ink: #e6e8eb; --soft: #9aa3af; --line: #2d333c; --code: #171b21;
    --gone: #3a2022; --gone-mark: #7c3336; --came: #18301f; --came-mark: #2c6a3d; --accent: #8fb1ff;
    --good: #6fcf8b; --warn: #f0b35a; --bad: #ff8a80; --on-kind: #0e1116;
    --k0: #7ab3ee; --k1: #f0a064; --k2: #78cf9c; --k3: #cf9be6; --k4: #f08c80; --k5: #72cdd4; --k6: #dcbf5a;
    --k7: #a9acf8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 0; }
p { margin: 4px 0 12px; }
.soft { color: var(--soft); }
code, pre, .mono {
  font: 12.5px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
pre { margin: 8px 0 0; padding: 10px 12px; background: var(--code); border-radius: 6px; overflow: auto;
  max-height: 420px; }
a { color: var(--accent); }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 12px 0 20px; font-size: 14px; }
nav a { text-decoration: none; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px;
  margin: 0 0 14px; }
.card > h3 { margin-bottom: 8px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px 14px; }
.tile b { display: block; font-size: 22px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }

.program { display: flex; flex-wrap: wrap; align-items: center; gap: 10px 0; padding: 4px 0; margin: 0;
  list-style: none; }
.program li { display: flex; align-items: center; }
.piece { display: inline-flex; align-items: center; justify-content: center; height: 40px; border-radius: 8px;
  background: var(--c); color: var(--on-kind); font-weight: 650; text-decoration: none;
  transition: opacity .12s; }
.piece:hover, .piece:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; }
.hole { display: inline-flex; align-items: center; justify-content: center; min-width: 24px; height: 24px;
  padding: 0 5px; border: 1.5px dashed var(--soft); border-radius: 12px; color: var(--soft);
  font-size: 11.5px; font-variant-numeric: tabular-nums; }
.wire { width: 7px; height: 2px; background: var(--line); }
.legend { display: flex; flex-wrap: wrap; gap: 6px 20px; margin-top: 14px; font-size: 13.5px;
  color: var(--soft); }
.legend > span { display: inline-flex; align-items: center; gap: 7px; }
.swatch { display: inline-flex; align-items: center; justify-content: center; min-width: 24px; height: 22px;
  padding: 0 6px; border-radius: 5px; background: var(--c); color: var(--on-kind); font-weight: 650;
  font-size: 12.5px; }
i { font-style: normal; }

.kind { border-left: 5px solid var(--c); scroll-margin-top: 12px; }
.kind:target { outline: 2px solid var(--c); }
.kind header { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 12px; }
.lists { display: grid; grid-template-columns: minmax(0, 2.6fr) minmax(0, 1.3fr) minmax(0, 1.2fr);
  gap: 10px 24px; margin-top: 10px; }
.lists h4 { margin: 0 0 2px; font-size: 12.5px; color: var(--soft); font-weight: 600; }
.lists ul { margin: 0; padding: 0; list-style: none; overflow-wrap: anywhere; }
details { margin-top: 10px; }
summary { cursor: pointer; color: var(--accent); font-size: 14px; }
.chip { display: inline-block; padding: 1px 8px; border-radius: 11px; border: 1px solid var(--line);
  font-size: 12.5px; color: var(--soft); overflow-wrap: anywhere; }
td .chip { white-space: nowrap; }
.chip.good { color: var(--good); border-color: currentColor; }
.chip.warn { color: var(--warn); border-color: currentColor; }
.chip.bad { color: var(--bad); border-color: currentColor; }

.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
tr:last-child td { border-bottom: 0; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.rewrite { margin-top: 12px; }
.rewrite .sides { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 8px; }
.rewrite pre { max-height: 320px; margin-top: 4px; white-space: pre-wrap; overflow-wrap: anywhere; }
.gone { background: var(--gone); } .came { background: var(--came); }
.gone mark { background: var(--gone-mark); color: inherit; }
.came mark { background: var(--came-mark); color: inherit; }
.ops td:nth-child(2) { width: 55%; }
.bar { display: flex; flex-direction: column; gap: 2px; padding-top: 4px; }
.bar i { display: block; height: 7px; border-radius: 2px; background: var(--soft); opacity: .45; }
.bar i + i { background: var(--accent); opacity: 1; }
.stages { display: flex; height: 26px; border-radius: 6px; overflow: hidden; margin: 4px 0 10px; gap: 2px; }
.stages i { display: block; min-width: 2px; background: var(--c); }
.sizes { display: flex; flex-wrap: wrap; gap: 4px; }
.sizes span { padding: 1px 7px; border: 1px solid var(--line); border-radius: 5px; font-size: 12.5px;
  font-variant-numeric: tabular-nums; }
@media (max-width: 720px) { .rewrite .sides, .lists { grid-template-columns: minmax(0, 1fr); } }
@media print { details > * { display: block; } }
"""
