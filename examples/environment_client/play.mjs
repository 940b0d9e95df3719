// Plays one episode of sums on an environment server, in Node:
//
//   kapelle serve environments --environments sums=arithmetic
//   cd examples/environment_client && npm ci && node play.mjs localhost:50051 sums
//
// It knows the contract (proto/kapelle/wire/environment_v1.proto) and nothing else of kapelle. A token is read from KAPELLE_TOKEN.

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const PROTO = process.env.KAPELLE_PROTO ?? fileURLToPath(new URL("../../proto/kapelle/wire/environment_v1.proto", import.meta.url));
const [address = "localhost:50051", environment = "", seed = "0"] = process.argv.slice(2);

const definition = loader.loadSync(PROTO, { keepCase: true, longs: String, oneofs: true, defaults: true });
const { Environments } = grpc.loadPackageDefinition(definition).kapelle.environment.v1;
const client = new Environments(address, grpc.credentials.createInsecure());

const metadata = new grpc.Metadata();
if (process.env.KAPELLE_TOKEN) metadata.set("authorization", `Bearer ${process.env.KAPELLE_TOKEN}`);

/** Ask one question and wait for its answer, 30 seconds at most; again where the connection broke, for a numbered Act is made once. */
function ask(method, question, tries = 3) {
  return new Promise((resolve, reject) => {
    const options = { deadline: Date.now() + 30_000 };
    client[method](question, metadata, options, (error, answer) => {
      if (!error) resolve(answer);
      else if (error.code === grpc.status.UNAVAILABLE && tries > 1) resolve(ask(method, question, tries - 1));
      else reject(error);
    });
  });
}

/** Add or subtract: the answer to a question such as 47+85. */
function answered(question) {
  const [, a, operator, b] = question.match(/^(\d+)([+-])(\d+)$/);
  return String(operator === "+" ? Number(a) + Number(b) : Number(a) - Number(b));
}

const agents = ["node"];
const began = await ask("Reset", { environment, agents, pick: { split: "train", index: 3 }, seed });
const turns = [];
let view = began.view;
while (view.movers.length > 0) {
  const moves = view.movers.map((agent) => ({ agent, text: answered(view.shown[agent]) }));
  turns.push({ seen: view.shown[moves[0].agent], said: moves[0].text });
  const answer = await ask("Act", { session: began.session, moves, number: turns.length });
  view = { movers: answer.view.movers, shown: { ...view.shown, ...answer.view.shown } };
}
const outcome = await ask("GetOutcome", { session: began.session });
await ask("Close", { session: began.session });
console.log(JSON.stringify({ version: began.version, turns, rewards: outcome.rewards, success: outcome.success }));
client.getChannel().close(); // `client.close` is the Close of the contract
