// How a page of mha explain looks, and the little that moves on it.
#pragma once

namespace command {

inline const char *const kStyle = R"(
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --text: #1c1e21; --faint: #667077; --line: #e1e4e8; --accent: #21828c;
  --code: #8a4b08; --up: 33 145 140; --down: 214 92 60; --hatch: #d3d8dd; --alert: #b3203f;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
@media (prefers-color-scheme: dark) {
  :root { --page: #111417; --card: #191d21; --text: #e8eaed; --faint: #98a2aa; --line: #2d3339; --accent: #5cc8c0; --code: #e3b341;
    --up: 60 180 170; --down: 226 110 80; --hatch: #3a424a; --alert: #ff8097 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--text); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px }
h1, h2, h3 { line-height: 1.25; margin: 0; font-weight: 650; letter-spacing: -.01em }
h1 { font-size: 30px } h2 { font-size: 21px } h3 { font-size: 17px; display: flex; flex-wrap: wrap; align-items: center; gap: 4px 10px }
p { margin: 6px 0; max-width: 74ch; overflow-wrap: anywhere } header p, .why { color: var(--faint) }
header { margin-bottom: 28px } header.next { margin-top: 72px; border-top: 1px solid var(--line); padding-top: 40px }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px 22px; margin: 16px 0 }
.scroll { overflow-x: auto; max-width: 100%; scrollbar-width: thin }
code { font: 13px var(--mono); color: var(--code); font-weight: 400; overflow-wrap: anywhere }
figure { margin: 0; min-width: 0; max-width: 100% } figcaption { font-size: 14px; margin-bottom: 6px }
figcaption span { color: var(--faint); font-size: 13px }
.alert { color: var(--alert); font-size: 14px }

/* the steps */
.number { font: 600 13px var(--mono); color: var(--page); background: var(--accent); border-radius: 99px; min-width: 28px; padding: 4px 8px;
  text-align: center }
.blocks { display: flex; flex-wrap: wrap; gap: 16px 20px; align-items: flex-start; margin-top: 12px }
.blocks .gap { align-self: center; color: var(--faint) }
.matrix table { border-collapse: collapse; border: solid var(--faint); border-width: 0 1.5px; border-radius: 5px;
  font: 12px var(--mono); font-variant-numeric: tabular-nums }
.matrix td { padding: 2px 6px; text-align: right; white-space: nowrap } .matrix .no { color: var(--faint); text-align: center }
.up { background: rgb(var(--up) / var(--a)) } .down { background: rgb(var(--down) / var(--a)) }

/* the maps */
.legend { display: flex; flex-wrap: wrap; gap: 10px 24px; align-items: flex-start; margin: 14px 0 22px; font-size: 13px;
  color: var(--faint) }
.scale { flex: 0 1 340px; min-width: 240px; margin: 0 14px 0 4px } .scale div { height: 12px; border-radius: 3px }
.scale ol { position: relative; list-style: none; margin: 0; padding: 0; height: 20px }
.scale li { position: absolute; transform: translateX(-50%); padding-top: 3px; white-space: nowrap }
.scale li::before { content: ""; position: absolute; left: 50%; top: 0; height: 4px; border-left: 1px solid var(--faint) }
.swatch { display: inline-block; width: 22px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px;
  border: 1px solid var(--line) }
.hatched { background: repeating-linear-gradient(45deg, transparent 0 3px, var(--hatch) 3px 4px) }
.nan { background: #d63056; color: #fff }
.grid { display: grid; gap: 26px 24px; grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--map)), 1fr)) }
.grid figure { max-width: 680px }
.row { display: flex; flex-wrap: wrap; gap: 26px 36px }
.weights { border-collapse: separate; border-spacing: 2px; font: 13px var(--mono); font-variant-numeric: tabular-nums }
.weights td { min-width: 52px; height: 38px; padding: 0 5px; text-align: center; border-radius: 4px }
.weights th { font: 13px system-ui, sans-serif; color: var(--faint); white-space: nowrap; padding: 2px 6px; max-width: 130px;
  overflow: hidden; text-overflow: ellipsis }
.weights tbody th { text-align: right; position: sticky; left: 0; background: var(--card) }
.upright th:not(:first-child) { writing-mode: vertical-rl; rotate: 180deg; text-align: left; max-height: 110px; padding: 6px 2px }
.picture { position: relative; touch-action: manipulation; cursor: crosshair }
.picture img { display: block; width: 100%; height: auto; min-height: 22px; max-height: 680px; image-rendering: pixelated;
  border-radius: 4px; outline-offset: 2px }
.mark { position: absolute; pointer-events: none; outline: 1.5px solid #fff; box-shadow: 0 0 0 3px #000a; display: none;
  min-width: 3px; min-height: 3px }
.axis { display: flex; justify-content: space-between; gap: 8px; font-size: 12px; color: var(--faint); padding-top: 3px }
.labelled { --cell: clamp(11px, min(100vw - 140px, 430px) / var(--columns), 26px); display: grid; width: max-content;
  grid-template-columns: minmax(0, max-content) calc(var(--cell) * var(--columns)) }
.labelled span { display: block; font-size: clamp(10px, var(--cell) * .75, 13px); line-height: var(--cell); color: var(--faint);
  white-space: nowrap; overflow: hidden; text-overflow: ellipsis }
.labelled .top { grid-column: 2; display: flex; align-items: flex-end; padding-bottom: 3px }
.labelled .top span { writing-mode: vertical-rl; rotate: 180deg; width: var(--cell); max-height: 90px }
.labelled .left span { text-align: right; height: var(--cell); padding-right: 5px; max-width: 110px }
.labelled img { height: calc(var(--cell) * var(--rows)); max-height: none }
output { display: block; font-size: 13px; min-height: 1.6em; padding-top: 4px; color: var(--faint); overflow-wrap: anywhere }
output b { color: var(--text); font: 600 13px var(--mono) }
footer { color: var(--faint); font-size: 13px; margin-top: 40px }
@media (max-width: 560px) {
  main { padding: 22px 14px 48px } h1 { font-size: 24px } .card { padding: 16px 14px; border-radius: 10px }
  .weights td { min-width: 44px; height: 34px; font-size: 12px }
  .many { border-spacing: 1px } .many td { min-width: 26px; height: 26px; padding: 0 1px; font-size: 9.5px }
  .many th { font-size: 11px; padding: 2px 3px }
  .matrix table { font-size: 11px } .matrix td { padding: 2px 3px }
}
@media print { .card { break-inside: avoid } }
)";

// What a picture can't say by itself: the cell under the pointer, or under the arrow keys, in all maps that belong together. Its value is
// read off the colour.
inline const char *const kScript = R"(
for (const section of document.querySelectorAll('.maps[data-power]')) {
  const side = +section.dataset.side, power = +section.dataset.power;
  const [n, m] = [+section.dataset.rows, +section.dataset.columns];
  const names = key => section.dataset[key] && section.dataset[key].split(' ');
  const rowNames = names('rowNames'), columnNames = names('columnNames') || (section.dataset.self && rowNames);
  const colours = section.dataset.palette.match(/.{6}/g).map(hex => parseInt(hex, 16)).map(c => [c >> 16, c >> 8 & 255, c & 255]);
  const pictures = [...section.querySelectorAll('.picture img')];
  const name = (labels, i) => labels ? `${labels[i]} (${i + 1})` : `${i + 1}`;
  const range = (labels, cell, count) => {
    const first = cell * side, last = Math.min(first + side, count) - 1;
    return name(labels, first) + (last > first ? ` ... ${name(labels, last)}` : '');
  };
  const pixels = new Map();
  const valueOf = (image, row, column) => {
    if (!pixels.has(image)) {
      const canvas = Object.assign(document.createElement('canvas'), {width: image.naturalWidth, height: image.naturalHeight});
      const context = canvas.getContext('2d');
      context.drawImage(image, 0, 0);
      pixels.set(image, context.getImageData(0, 0, canvas.width, canvas.height).data);
    }
    const [r, g, b, a] = pixels.get(image).slice(4 * (row * image.naturalWidth + column));
    if (a === 0) return 'masked';
    const far = colours.map(c => (c[0] - r) ** 2 + (c[1] - g) ** 2 + (c[2] - b) ** 2);
    const nearest = far.indexOf(Math.min(...far));
    if (nearest === 0) return 'NaN';
    const weight = ((nearest - 1) / (colours.length - 2)) ** (1 / power);
    return weight < .001 && weight > 0 ? weight.toExponential(1) : weight.toPrecision(2);
  };
  let at = [0, 0];
  const show = (row, column) => {
    at = [row, column];
    for (const image of pictures) {
      const mark = image.nextElementSibling, output = image.closest('figure').querySelector('output');
      const [rows, columns] = [image.naturalHeight, image.naturalWidth];
      Object.assign(mark.style, {display: 'block', left: `${100 * column / columns}%`, top: `${100 * row / rows}%`,
        width: `${100 / columns}%`, height: `${100 / rows}%`});
      const value = document.createElement('b');
      value.textContent = valueOf(image, row, column);
      output.replaceChildren(`${range(rowNames, row, n)} \u2192 ${range(columnNames, column, m)}: `, value);
    }
  };
  for (const image of pictures) {
    const point = event => {
      const box = image.getBoundingClientRect();
      const cell = (offset, length, count) => Math.min(count - 1, Math.max(0, Math.floor(offset / length * count)));
      show(cell(event.clientY - box.top, box.height, image.naturalHeight), cell(event.clientX - box.left, box.width, image.naturalWidth));
    };
    image.addEventListener('pointermove', point);
    image.addEventListener('pointerdown', point);
    image.addEventListener('keydown', event => {
      const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
      if (!step) return;
      event.preventDefault();
      show(Math.min(image.naturalHeight - 1, Math.max(0, at[0] + step[0])), Math.min(image.naturalWidth - 1, Math.max(0, at[1] + step[1])));
    });
    image.closest('figure').querySelector('output').textContent = 'Point at a cell, or tap it.';
  }
}
)";

}  // namespace command
