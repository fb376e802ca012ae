"use strict";
// Filters of a page of measurements. Without this script everything is shown.
(() => {
  const NAMES = ["device", "dtype", "phase"];
  const start = () => {
    const sections = [...document.querySelectorAll(".measurement")];
    const legend = document.querySelector(".bench-legend");
    if (!sections.length || !legend) return;
    const chosen = {};
    const show = () => {
      for (const section of sections) section.hidden = NAMES.some((name) => chosen[name] && section.dataset[name] !== chosen[name]);
      // a device's heading and records go with its sections
      let device = null;
      for (const node of legend.parentElement.children) {
        if (node.tagName === "H2") device = node.id && node.dataset.device;
        if (device && !node.classList.contains("measurement")) node.hidden = Boolean(chosen.device) && device !== chosen.device;
      }
    };
    for (const section of sections) {
      let node = section;
      while (node && node.tagName !== "H2") node = node.previousElementSibling;
      if (node) node.dataset.device = section.dataset.device;
    }
    const filters = document.createElement("div");
    filters.className = "bench-filters";
    for (const name of NAMES) {
      const values = [...new Set(sections.map((section) => section.dataset[name]))];
      if (values.length < 2) continue;
      const select = document.createElement("select");
      select.name = name;
      for (const value of ["", ...values]) select.append(new Option(value || "all", value));
      select.addEventListener("change", () => { chosen[name] = select.value; show(); });
      const label = document.createElement("label");
      label.append(name, select);
      filters.append(label);
    }
    legend.before(filters);
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
})();
