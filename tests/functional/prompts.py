"""Twenty prompts of mixed kind and length, for comparisons token by token."""

from __future__ import annotations

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three primary colours are red,",
    "List five animals that live in the forest:\n1.",
    "In 1969, humans first",
    "The quick brown fox",
    "A recipe for pancakes: take two eggs, 200 g of flour,",
    "Question: What is 7 times 8?\nAnswer:",
    "Photosynthesis is the process by which plants",
    "La capitale de l'Espagne est",
    "My favourite season is autumn, because",
    "import numpy as np\n\nx = np.",
    "The difference between a crocodile and an alligator is that",
    "Dear Sir or Madam,\n\nI am writing to",
    "Emoji test: 🎉🎉🎉 and then",
    "Albert Einstein was born in Ulm in 1879. He developed the theory of relativity, one of the "
    "two pillars of modern physics. " * 3 + "He",
    "Seven days make a",
    "In computing, a hash table is a data structure that implements an associative array. " * 5
    + "Its average cost of a look-up",
]

CONVERSATIONS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
CONVERSATIONS[3] = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "At what temperature does water boil?"},
    {"role": "assistant", "content": "At 100 degrees Celsius at sea level."},
    {"role": "user", "content": "And on a high mountain?"},
]
