// The glossary: the words of the page, explained where they stand and in one list.

const WORDS = {
  "peak": "The most bytes that are alive at any moment of a step. This is what has to fit into the memory of the device.",
  "baseline": "The program without passes.",
  "persistent": "Memory that is taken during the whole step: parameters, optimizer state, the batch.",
  "predicted": "Worked out from the program, without running it.",
  "measured": "Taken from a run on this machine.",
  "measured ops": "Each op was timed by itself on this machine; the time of a step is their sum. The step was not timed as a whole.",
  "roofline": "An estimate of time from the device's arithmetic speed and memory bandwidth; nothing was run.",
  "forward": "The part of a step that computes the loss from the batch.",
  "backward": "The part of a step that computes the gradients, from the loss back to the first layer.",
  "update": "The part of a step in which the optimizer changes the parameters.",
  "saved for backward": "Results of forward that stay in memory until backward reads them; also called saved activations.",
  "recomputed": "Dropped after forward, and computed a second time when backward needs it: less memory, more time. Its name ends with '.",
  "gradient": "What backward computes for a tensor; its name ends with ~.",
  "offloaded": "Copied to the host's memory or a disk after forward, and copied back before backward needs it.",
  "op": "One operation of the program, such as a matrix product.",
  "view": "A tensor that shares the memory of another one, such as a transpose; it takes no bytes of its own.",
  "pass": "A rewrite of the program. Bitwise ones leave every result as it was, to the last bit.",
  "budget": "How many bytes the peak may reach.",
};

/** A word that says what it means when it is pointed at. */
const term = (word, label = word) => element("abbr", { title: WORDS[word] }, label);

function startWords() {
  replaceChildren(byId("words-list"), Object.entries(WORDS).flatMap(([word, meaning]) => [element("dt", {}, word), element("dd", {}, meaning)]));
}
