// Asks the search of the built site what readers ask, in Node, by the very program that browsers run:
//
//     node tools/docs_site/search.js build/site            each question of questions.json; fails unless its page comes first
//     node tools/docs_site/search.js build/site "my words"  what the search finds, best first
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const SETUP = 0, QUERY = 2, RESULT = 3; // types of the worker's messages, in Material for MkDocs

function worker(site) {
  const folder = path.join(site, "assets/javascripts/workers");
  const file = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));
  const answers = [];
  let listener;
  const self = {
    addEventListener: (kind, call) => { if (kind === "message") listener = call; },
    postMessage: (message) => answers.push(message),
    importScripts: () => {},
    location: { href: "file:///" },
    console, setTimeout, URL,
  };
  self.self = self;
  vm.createContext(self);
  vm.runInContext(fs.readFileSync(path.join(folder, file), "utf8"), self);
  return async (message) => {
    answers.length = 0;
    await listener({ data: message });
    return answers;
  };
}

async function main(site, words) {
  const ask = worker(site);
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
  await ask({ type: SETUP, data: { ...index, options: { suggest: false } } });
  const expected = JSON.parse(fs.readFileSync(path.join(__dirname, "questions.json"), "utf8"));
  let wrong = 0;
  for (const query of words.length ? words : Object.keys(expected)) {
    const found = (await ask({ type: QUERY, data: query })).find((each) => each.type === RESULT);
    const pages = found ? found.data.items.map((group) => group[0].location) : [];
    if (words.length) console.log([query, ...pages.slice(0, 10)].join("\n    "));
    else if (pages[0] !== `${expected[query]}.html`) {
      wrong += 1;
      console.error(`The search for "${query}" finds ${pages[0]} first, and ${expected[query]}.html is the page. Put its words into that page's title.`);
    }
  }
  return wrong ? 1 : 0;
}

main(process.argv[2], process.argv.slice(3)).then((code) => { process.exitCode = code; });
