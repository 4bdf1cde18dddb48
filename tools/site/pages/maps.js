/* The page of attention maps: a head and a word are chosen, and what the word attends to is shown. */
const titles = ["the word before", "the same word", "the first word", "the last comma", "what is near", "everything alike"];

async function showMaps(place) {
  const { words, weights } = await (await fetch(place.dataset.source)).json();
  let head = 0, query = 11;

  const element = (parent, kind, className, text = "") => {
    const made = parent.appendChild(document.createElement(kind));
    made.className = className;
    made.textContent = text;
    return made;
  };
  const button = (parent, className, text, choose) => {
    const made = element(parent, "button", className, text);
    made.type = "button";
    made.addEventListener("click", () => { choose(); show(); });
    return made;
  };

  place.textContent = "";
  const heads = element(place, "div", "maps-heads");
  const headButtons = titles.map((title, i) => button(heads, "maps-head", `${i + 1}: ${title}`, () => { head = i; }));
  const sentence = element(place, "div", "maps-sentence");
  const wordButtons = words.map((word, i) => {
    const made = button(sentence, "maps-word", word, () => { query = i; });
    element(made, "span", "maps-share");
    return made;
  });
  const said = element(place, "p", "maps-said");
  said.setAttribute("aria-live", "polite");
  const walk = element(place, "div", "maps-heads");
  button(walk, "maps-head", "← word before", () => { query = (query + words.length - 1) % words.length; });
  button(walk, "maps-head", "next word →", () => { query = (query + 1) % words.length; });
  const grid = element(place, "div", "maps-grid");
  grid.style.setProperty("--words", words.length);
  const cells = words.map((word, i) => words.map((key, j) => {
    const cell = element(grid, "div", "maps-cell");
    cell.title = j > i ? `${word} does not see ${key}` : "";
    cell.addEventListener("click", () => { query = i; show(); });
    return cell;
  }));

  const colour = (weight) => `rgb(var(--maps) / ${Math.sqrt(weight / 1000).toFixed(3)})`;
  function show() {
    headButtons.forEach((made, i) => made.setAttribute("aria-pressed", i === head));
    const row = weights[head][query];
    wordButtons.forEach((made, j) => {
      made.setAttribute("aria-pressed", j === query);
      made.classList.toggle("maps-later", j > query);
      made.style.backgroundColor = colour(row[j]);
      made.lastChild.textContent = j > query ? "" : `${Math.round(row[j] / 10)}%`;
    });
    const best = row.indexOf(Math.max(...row));
    said.textContent = `Head ${head + 1} (${titles[head]}): “${words[query]}” attends most to “${words[best]}”, with ${Math.round(row[best] / 10)}%.`;
    cells.forEach((line, i) => line.forEach((cell, j) => {
      cell.classList.toggle("maps-chosen", i === query);
      cell.classList.toggle("maps-later", j > i);
      cell.style.backgroundColor = j > i ? "" : colour(weights[head][i][j]);
      if (j <= i) cell.title = `${words[i]} → ${words[j]}: ${(weights[head][i][j] / 10).toFixed(1)}%`;
    }));
  }
  show();
}

const place = document.getElementById("maps");
if (place) showMaps(place);
