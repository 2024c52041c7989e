// The connection to the server: requests with the token, and events for as long as the page is open.

const KEY = "pi05_ros token";

/** fetch with the token of this tab, if it has one. Throws TokenNeeded where the server wants another one. */
export async function ask(path, options = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { cache: "no-store", ...options, headers });
  if (response.status === 401) throw new TokenNeeded(token ? "That is not the token." : "");
  return response;
}

export class TokenNeeded extends Error {}

/** Shows the form of the page until a token is given. refusal: what was wrong with the one before. */
export function askForToken(refusal) {
  const form = document.getElementById("token-form");
  const field = document.getElementById("token");
  document.getElementById("token-refused").textContent = refusal;
  form.hidden = false;
  field.focus();
  return new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, field.value.trim());
      field.value = "";
      form.hidden = true;
      resolve();
    };
  });
}

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

export class Link {
  /** heard: performance.now() when the server last said anything; state: "connecting", "open", "lost", "locked". */
  constructor(path, onMessage) {
    Object.assign(this, { path, onMessage, heard: performance.now(), state: "connecting" });
  }

  /** Follows the events, and begins again whenever they end. */
  async follow() {
    for (;;) {
      try {
        await this.#listen();
        this.state = "lost";
      } catch (error) {
        if (error instanceof TokenNeeded) {
          this.state = "locked";
          await askForToken(error.message);
          this.state = "connecting";
          continue;
        }
        this.state = "lost";
      }
      await pause(1000);
    }
  }

  async #listen() {
    const stop = new AbortController();
    const watchdog = setInterval(() => {
      if (this.silence > 10) stop.abort(); // a half-open connection says nothing for ever
    }, 1000);
    this.opened = performance.now();
    try {
      const response = await ask(this.path, { signal: stop.signal });
      if (!response.ok) throw new Error(`status ${response.status}`);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        this.heard = performance.now();
        this.state = "open";
        const events = (text + value).split("\n\n");
        text = events.pop();
        for (const event of events) if (event.startsWith("data: ")) this.onMessage(JSON.parse(event.slice(6)));
      }
    } finally {
      clearInterval(watchdog);
    }
  }

  /** Seconds in which this connection has said nothing. */
  get silence() {
    return (performance.now() - Math.max(this.heard, this.opened ?? 0)) / 1000;
  }

  /** Seconds since the server said anything at all. */
  get age() {
    return (performance.now() - this.heard) / 1000;
  }
}
