  // ------------------------------------------------------------------ tables

  const sorted = new Map(); // the column and direction of each table that was sorted

  function sortable(table) {
    const headings = [...table.tHead.rows[0].cells];
    const keyOf = (row, column) => {
      const cell = row.cells[column];
      const text = cell.dataset.sort ?? cell.textContent.trim();
      return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
    };
    // Numbers before words, and what has no number last whichever way the column is sorted.
    const compare = (a, b, sign) => {
      if (isNumber(a) !== isNumber(b)) return isNumber(a) ? -1 : 1;
      return sign * (isNumber(a) ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    };
    const sort = ([column, sign]) => {
      for (const heading of headings) heading.setAttribute("aria-sort", "none");
      headings[column].setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => compare(keyOf(a, column), keyOf(b, column), sign));
      table.tBodies[0].append(...rows);
      sorted.set(table.id, [column, sign]);
    };
    headings.forEach((heading, column) => {
      heading.querySelector("button").addEventListener("click", () => {
        sort([column, heading.getAttribute("aria-sort") === "ascending" ? -1 : 1]);
      });
    });
    if (sorted.get(table.id)?.[0] < headings.length) sort(sorted.get(table.id));
  }

  // Makes a card of each row where a narrow screen has no room for the table; a wide one scrolls it.
  function fitTable(table) {
    const box = table.parentElement;
    table.classList.remove("cards");
    const wider = box.scrollWidth > box.clientWidth;
    table.classList.toggle("cards", wider && matchMedia("(max-width: 900px)").matches);
    // What scrolls can be reached by keyboard, too.
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, column) => { if (column) cell.dataset.label = names[column]; });
    }
  }

  // ------------------------------------------------------------------ the whole page

  // Draws what depends on the width.
  function fit() {
    drawRungs();
    drawParallel();
    drawTimeline();
    document.querySelectorAll("#trials, #devices").forEach(fitTable);
  }

  function draw() {
    data = JSON.parse(document.getElementById("data").textContent);
    drawLegend();
    drawCurves();
    fit();
    document.querySelectorAll("table.sortable").forEach(sortable);
    document.getElementById("zoom-in").addEventListener("click", () => zoomBy(0.5));
    document.getElementById("zoom-out").addEventListener("click", () => zoomBy(2));
    document.getElementById("zoom-all").addEventListener("click", () => { zoomed = null; drawTimeline(); });
    for (const link of document.querySelectorAll("td.status a")) {
      link.addEventListener("click", () => { document.querySelector(link.hash).open = true; });
    }
  }

  // Takes over a newer page without losing what was unfolded, hidden, sorted, zoomed or scrolled.
  function takeOver(newer) {
    const open = [...document.querySelectorAll("details[open]")].map((each) => each.id);
    const scrolled = [...document.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
    for (const part of ["main", "#data"]) document.querySelector(part).replaceWith(newer.querySelector(part));
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    tip.hidden = true;
    draw();
    document.querySelectorAll(".scroll").forEach((each, number) => { each.scrollLeft = scrolled[number] ?? 0; });
  }

  let version = "";
  async function refresh() {
    try {
      const answer = await fetch(location.pathname, { headers: { "If-None-Match": version }, cache: "no-store" });
      if (answer.status === 200) {
        version = answer.headers.get("ETag");
        takeOver(new DOMParser().parseFromString(await answer.text(), "text/html"));
      }
    } catch {
      document.getElementById("state").textContent = "this page is no longer served; start cerebro-hydra watch again";
    }
    refreshLater();
  }
  function refreshLater() {
    if (data.running && location.protocol === "http:") setTimeout(refresh, 2000);
  }

  draw();
  refreshLater();
  let resized = 0;
  addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(fit); });
  addEventListener("beforeprint", fit);
