// Cameras as the model saw them. Pictures are fetched, since an <img> would not send the token.

import { $, build, el, put } from "./elements.js";
import { ask } from "./link.js";

/** Milliseconds between two pictures of a camera. */
const PERIOD = 500;

export class Cameras {
  #snapshot = null;
  #timer = null;
  /** By camera: which request its picture is of, when it came, and whether one is on its way. */
  #fetched = new Map();

  show(snapshot) {
    this.#snapshot = snapshot;
    const { cameras, last, metadata } = snapshot;
    const figures = build("cameras", cameras.map((camera) => camera.name).join(), () => {
      this.#fetched.clear();
      return cameras.map(({ name }) =>
        el(
          "figure",
          {},
          el("div", { class: "frame" }, el("img", { alt: `${name}, as the model saw it` }), el("span")),
          el("figcaption"),
        ),
      );
    });
    cameras.forEach((camera, index) => {
      const [frame, caption] = figures[index].children;
      const [image, absent] = frame.children;
      image.hidden = !camera.seen || !image.src;
      absent.textContent = camera.seen ? "" : camera.masked ? "masked" : "not sent";
      const size = metadata.image_size;
      const shape = camera.width ? `${camera.width}×${camera.height} → ${size}×${size}` : "";
      caption.replaceChildren(el("b", { textContent: camera.name }), el("small", { textContent: shape }));
      if (camera.seen) this.#fetch(camera.name, image, last.number);
    });
    put("prompt", `“${last.prompt}”`);
    $("prompt").hidden = !last.prompt;
  }

  async #fetch(name, image, number) {
    const before = this.#fetched.get(name) ?? { number: 0, at: -PERIOD, busy: false };
    if (before.busy || before.number === number) return;
    const wait = before.at + PERIOD - performance.now();
    if (wait > 0) {
      this.#timer ??= setTimeout(() => {
        this.#timer = null;
        this.show(this.#snapshot);
      }, wait);
      return;
    }
    this.#fetched.set(name, { ...before, busy: true });
    try {
      const response = await ask(`status/cameras/${encodeURIComponent(name)}.jpg`);
      if (response.ok) {
        const url = URL.createObjectURL(await response.blob());
        URL.revokeObjectURL(image.src);
        image.src = url;
        image.hidden = false;
      }
    } catch {
      // The events say that the server is gone, or wants a token.
    }
    this.#fetched.set(name, { number, at: performance.now(), busy: false });
    this.show(this.#snapshot); // which may be of a later request by now
  }
}
