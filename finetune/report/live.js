// Fetches the page again and replaces the parts that have changed: what is open, scrolled or pointed at stays so.
const SECONDS = 2;
const sign = document.querySelector(".live");
let tag = null;
let shown = parse(document.documentElement.outerHTML);  // the page as it was fetched: its elements have been touched since
function parse(text) { return new DOMParser().parseFromString(text, "text/html"); }
function replaceChanged(element, before, after, replaced) {
  if (before.outerHTML === after.outerHTML) return;
  const inside = ["MAIN", "HEADER", "SECTION"].includes(after.tagName);
  if (inside && before.tagName === after.tagName && element.children.length === after.children.length) {
    [...element.children].forEach((child, i) => replaceChanged(child, before.children[i], after.children[i], replaced));
    return;
  }
  const fresh = document.importNode(after, true);
  for (const selector of ["details", ".scroll"]) {
    const old = [...element.parentNode.querySelectorAll(selector)].filter((each) => element.contains(each));
    [fresh, ...fresh.querySelectorAll(selector)].filter((each) => each.matches(selector)).forEach((each, i) => {
      if (old[i]) { each.open = old[i].open; requestAnimationFrame(() => { each.scrollLeft = old[i].scrollLeft; }); }
    });
  }
  const focused = element.contains(document.activeElement) ? document.activeElement.closest(".chart") : null;
  replaced.push([element, fresh, focused && focused.id]);
  element.replaceWith(fresh);
}
function update(text) {
  const next = parse(text), replaced = [];
  document.title = next.title;
  document.getElementById("data").textContent = next.getElementById("data").textContent;
  for (const part of ["header", "main"]) {
    replaceChanged(document.querySelector(part), shown.querySelector(part), next.querySelector(part), replaced);
  }
  shown = next;
  for (const [old, fresh, focused] of replaced) {
    const figures = fresh.matches(".chart") ? [fresh] : [...fresh.querySelectorAll(".chart")];
    wirePlots(figures);
    for (const figure of figures) {
      const before = old.id === figure.id ? old : old.querySelector("#" + figure.id);
      const cursor = before && before.querySelector(".cursor"), plot = figure.querySelector(".plot");
      if (figure.id === focused) plot.focus({ preventScroll: true });
      if (cursor && cursor.style.left && (!cursor.hidden || figure.id === focused)) plot.showNear(parseFloat(cursor.style.left));
    }
  }
}
function signal(state, text) {
  const now = document.querySelector(".live");
  now.dataset.state = state;
  now.querySelector("span").textContent = text;
}
async function renew() {
  try {
    const answer = await fetch(location.href, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    const isSelecting = String(window.getSelection()) !== "";
    if (answer.status === 200 && !isSelecting) {
      update(await answer.text());
      tag = answer.headers.get("ETag");
      signal("live", "live, as of " + new Date().toLocaleTimeString());
    } else if (answer.status === 304) {
      sign.dataset.state = "live";
    }
  } catch (error) {
    signal("lost", "no answer: finetune report --serve has ended");
  }
  setTimeout(renew, SECONDS * 1000);
}
renew();
