// A link to a finding unfolds it. A click on a heading of a table, or Enter on it, sorts the table by
// that column; again, the other way.
"use strict";
const unfold = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const fold = target?.matches("article") ? target.querySelector("details") : target?.closest("details");
  if (fold) {
    fold.open = true;
    target.scrollIntoView();
  }
};
window.addEventListener("hashchange", unfold);
unfold();
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      // A cell without a key is sorted by its text.
      const key = (row) => row.cells[column].dataset.key ?? row.cells[column].textContent.trim();
      const compare = (a, b) => key(a).localeCompare(key(b), "en", { numeric: true });
      // Where numbers are compared, 10.5 is not "10" and then "5".
      const numeric = (a, b) => Number(key(a)) - Number(key(b));
      const rows = [...body.rows];
      const order = rows.every((row) => !Number.isNaN(Number(key(row)))) ? numeric : compare;
      body.append(...rows.sort((a, b) => sign * order(a, b)));
      for (const other of headings) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    });
  });
}
