// The values under the pointer (or finger, or arrow key), for every line of a plot.
function wirePlots(figures) {
  const data = JSON.parse(document.getElementById("data").textContent);
  for (const figure of figures) wirePlot(figure, data[figure.id].filter((line) => line.points.length));
}
function wirePlot(figure, lines) {
  const plot = figure.querySelector(".plot"), cursor = figure.querySelector(".cursor"), tip = figure.querySelector(".tip");
  const places = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
  let at = places.length - 1;
  const nearest = (list, x) => list.reduce((best, item, i) => (Math.abs(item - x) < Math.abs(list[best] - x) ? i : best), 0);
  const show = (index) => {
    at = Math.max(0, Math.min(places.length - 1, index));
    const x = places[at];
    tip.replaceChildren();
    let step;
    for (const line of lines) {
      const i = nearest(line.points.map((point) => point[0]), x);
      if (Math.abs(line.points[i][0] - x) > 4) continue;
      if (step === undefined || line.points[i][0] === x) step = line.steps[i];
      const row = document.createElement("div"), dot = document.createElement("i");
      dot.className = "run-" + (line.run % 6);
      row.append(dot, line.label + " ", Object.assign(document.createElement("b"), { textContent: line.points[i][2] }));
      tip.append(row);
    }
    tip.prepend(Object.assign(document.createElement("div"), { textContent: "step " + Number(step).toLocaleString("en") }));
    cursor.style.left = x + "%";
    tip.style.left = x < 50 ? "calc(" + x + "% + 0.6rem)" : "auto";
    tip.style.right = x < 50 ? "auto" : "calc(" + (100 - x) + "% + 0.6rem)";
    cursor.hidden = tip.hidden = false;
  };
  const hide = () => { cursor.hidden = tip.hidden = true; };
  plot.showNear = (x) => show(nearest(places, x));
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show(nearest(places, (100 * (event.clientX - box.left)) / box.width));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("focus", () => show(at));
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) { show(at + move); event.preventDefault(); }
  });
}
wirePlots(document.querySelectorAll(".chart"));
