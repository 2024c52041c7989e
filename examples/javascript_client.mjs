// An action chunk with fetch: node examples/javascript_client.mjs [http://127.0.0.1:8000]   (Node 20 or newer)
// requestActions also runs in a browser, on the server's own pages or on those that its option --origin names.

export async function requestActions(url, observation, prompt, { token = "", signal = AbortSignal.timeout(30_000) } = {}) {
  const response = await fetch(`${url}/v1/actions/generations`, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) },
    body: JSON.stringify({ input: { prompt, observation } }),
    signal,
  });
  const reply = await response.json();
  if (!response.ok) throw new Error(`${response.status} ${reply.error?.field ?? ""}: ${reply.detail}`);
  return reply.data[0].action.values; // horizon rows of action_dim numbers, robot units
}

async function main() {
  const url = process.argv[2] ?? "http://127.0.0.1:8000";
  const token = process.env.PI05_ROS_TOKEN ?? "";
  // A stand-in for a camera: one red pixel, the base64 text of a PNG file. In a browser canvas.toDataURL() gives such text.
  const pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGM4oKAAAAKkAQHjTKctAAAAAElFTkSuQmCC";
  const images = { cam_high: { b64_json: pixel } };
  const actions = await requestActions(url, { images, state: new Array(14).fill(0) }, "uncap the pen", { token });
  console.log(`actions: ${actions.length} x ${actions[0].length}`);
  console.log("first row:", actions[0].map((value) => value.toFixed(4)).join(" "));
  try {
    await requestActions(url, { images, state: [0, 0, 0] }, "uncap the pen", { token });
  } catch (error) {
    console.log("a state that is too short:", error.message);
  }
}

if (typeof process !== "undefined" && import.meta.url === `file://${encodeURI(process.argv[1])}`) await main();
