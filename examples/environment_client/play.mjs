// Plays one episode of sums on an environment server, in Node 22 or later (Node 20 needs --experimental-websocket):
//
//   kapelle serve environments --environments sums=arithmetic
//   node examples/environment_client/play.mjs localhost:50051 sums
//
// It knows the protocol (docs/environment_server.md) and nothing else of kapelle. A token is read from KAPELLE_TOKEN.

const [address = "localhost:50051", environment = "", seed = "0"] = process.argv.slice(2);

const headers = process.env.KAPELLE_TOKEN ? { Authorization: `Bearer ${process.env.KAPELLE_TOKEN}` } : {};
const socket = new WebSocket(`ws://${address}/v1/worlds`, { headers });
const waiting = new Map();

function settle({ id, value, error, refused }) {
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  const [what, message] = error ?? refused ?? [];
  if (what === undefined) resolve(value);
  else reject(new Error(`${what}: ${message}`));
}
socket.onmessage = ({ data }) => settle(JSON.parse(data));
socket.onclose = () => waiting.forEach(({ reject }) => reject(new Error("the connection has ended, and its sessions with it")));

/** Send a question and wait for its answer. */
let sent = 0;
function ask(call, question) {
  const id = (sent += 1);
  socket.send(JSON.stringify({ id, call, ...question }));
  return new Promise((resolve, reject) => waiting.set(id, { resolve, reject }));
}

/** Add or subtract: the answer to a question such as 47+85. */
function answered(question) {
  const [, a, operator, b] = question.match(/^(\d+)([+-])(\d+)$/);
  return String(operator === "+" ? Number(a) + Number(b) : Number(a) - Number(b));
}

await new Promise((resolve, reject) => {
  socket.onopen = resolve;
  socket.onerror = () => reject(new Error(`no environment server at ${address}, or it refuses the token`));
});
const session = 1;
const played = { environment, agents: ["node"], split: "train", index: 3, seed: Number(seed) };
const { version, view } = await ask("reset", { session, ...played });
const turns = [];
while (view.movers.value.length > 0) {
  const actions = {};
  for (const agent of view.movers.value) {
    const seen = view.shown[agent].value;
    actions[agent] = answered(seen);
    turns.push({ seen, said: actions[agent] });
  }
  const moved = await ask("act", { session, actions });
  view.movers = moved.view.movers;
  Object.assign(view.shown, moved.view.shown);
}
const { rewards, success } = await ask("outcome", { session });
await ask("close", { session });
console.log(JSON.stringify({ version, turns, rewards, success }));
socket.close();
