/* Problems to begin with. Tokens, queries and head are the user's to move. */
"use strict";

const PRESETS = {
  "Example 1 of the paper": {
    p: 2,
    samples: [
      { tokens: [[5, 0], [0, 0], [0, 1]], z: [5, 0], y: 1 },
      { tokens: [[-5, 0], [0, 0], [0, -1]], z: [-5, 0], y: -1 },
    ],
    heads: [[0.2, 0]],
  },
  "Figure 2 of the paper (p = 3, without the token at 0)": {
    p: 3,
    samples: [
      { tokens: [[5, 0], [0, 1]], z: [5, 0], y: 1 },
      { tokens: [[-5, 0], [0, -1]], z: [-5, 0], y: -1 },
    ],
    heads: [[0.2, 0]],
  },
  "Example 2 of the paper": {
    p: 1.75,
    samples: [
      { tokens: [[-5.4, 2.4], [2.8, 4.2], [2.6, -0.2]], z: [-5.4, 2.4], y: 1 },
      { tokens: [[0.8, -4.4], [-2.2, -0.8], [1.8, 0.2]], z: [0.8, -4.4], y: -1 },
    ],
    heads: [[0.3, 0.4]],
  },
  "p changes the selected token": {
    p: 1.1,
    samples: [
      { tokens: [[-1.5, 0], [1, 1.5], [-3.5, -4]], z: [-1.75, 0.5], y: 1 },
      { tokens: [[-3.5, 2.5], [0, 1.5], [-1.5, -1.5]], z: [-2, -2], y: -1 },
    ],
    heads: [[1, 1]],
  },
  "Two heads": {
    p: 2,
    samples: [
      { tokens: [[3, 1], [-2, 3], [-1, -2]], z: [1, 1], y: 1 },
      { tokens: [[2, -3], [-3, -1], [1, 2]], z: [-1, 1.5], y: -1 },
    ],
    heads: [[1, 0.2], [-0.2, 1]],
  },
  "Infeasible: one query, opposite directions": {
    p: 2,
    source: "scores",
    samples: [
      { tokens: [[2, 1], [-1, 1.5], [-2, 0.5]], z: [1, 0.5], y: 1 },
      { tokens: [[2, -1], [-2, -0.5], [0.5, -2]], z: [1, 0.5], y: -1 },
    ],
    heads: [[1, 0]],
  },
};
