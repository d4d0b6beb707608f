"use strict";
// Puts a newer page in the place of this one, and leaves what the reader chose as it is.
let last = "";
const isBusy = () => !getSelection().isCollapsed || document.querySelector(".tip:not([hidden])");
const replace = (page) => {
  const name = (details) => details.querySelector("summary").textContent.replace(/^\d+/, "");
  const open = new Map([...document.querySelectorAll("details")].map((details) => [name(details), details.open]));
  for (const part of ["header", "main"]) document.querySelector(part).replaceWith(page.querySelector(part));
  for (const details of document.querySelectorAll("details")) details.open = open.get(name(details)) ?? details.open;
  start();
};
const refresh = async () => {
  const began = performance.now();
  try {
    const answer = await fetch("/"), text = await answer.text();
    if (!answer.ok) throw new Error(text);
    document.querySelector("#trouble")?.remove();
    if (text !== last && !isBusy()) {
      if (last) replace(new DOMParser().parseFromString(text, "text/html"));
      last = text;
    }
  } catch (error) {
    const trouble = document.querySelector("#trouble") ?? document.createElement("p");
    [trouble.id, trouble.className] = ["trouble", "bad"];
    trouble.textContent = error instanceof TypeError ? "Not up to date: lora-train report --watch has ended." : error.message;
    document.querySelector("header").append(trouble);
  }
  // A long run takes long to read: most of the time is left to the training.
  setTimeout(refresh, Math.max(2000, 10 * (performance.now() - began)));
};
refresh();
