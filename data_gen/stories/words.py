"""Words and phrases of the story problems (`data_gen.stories.stories`).

Each phrase of a bank is equally likely. The phrases of a bank begin with different words, so the first token determines
the rest: a free choice, about which both models should be equally unsure, then a run of tokens that both predict.
"""

NAMES = ("Mia", "Tom", "Ana", "Leo", "Eva", "Sam", "Ida", "Max", "Zoe", "Ben", "Lia", "Jon", "Amy", "Kim", "Ned", "Ray")
THINGS = (
    "apples",
    "pens",
    "cups",
    "books",
    "coins",
    "shells",
    "stamps",
    "balls",
    "cards",
    "keys",
    "lamps",
    "hats",
    "boxes",
    "eggs",
    "stones",
    "candles",
)
FRUITS = ("apple", "banana", "cherry", "date", "fig", "grape", "kiwi", "lemon", "mango", "olive", "pear", "plum")
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey", "pink", "orange", "purple", "golden")
SIZES = ("small", "large", "tidy", "old", "new", "quiet", "warm", "plain", "bright", "heavy", "round", "narrow")
FURNITURE = ("shelf", "table", "drawer", "basket", "bench", "desk", "tray", "chest", "cart", "crate", "bag", "bowl")
PLACES = (
    "window",
    "door",
    "garden",
    "kitchen",
    "river",
    "market",
    "school",
    "station",
    "bridge",
    "harbour",
    "barn",
    "tower",
)
ANIMALS = ("cat", "dog", "horse", "goat", "crow", "fox", "hen", "mouse", "owl", "sheep", "duck", "rabbit")
ORDINALS = ("first", "second", "third", "fourth", "fifth")

GAINS = (
    "buys {k} more",
    "finds {k} more",
    "picks up {k} more",
    "is given {k} more",
    "wins {k} more",
    "collects {k} more",
)
LOSSES = ("gives away {k}", "loses {k}", "sells {k}", "lends out {k}", "breaks {k}", "throws away {k}")
GAIN_REASONS = ("getting more means that we add", "more of them means a sum", "this makes the pile grow, so we add")
LOSS_REASONS = (
    "having fewer means that we subtract",
    "less of them means a difference",
    "this makes the pile shrink, so we subtract",
)
GROUP_REASONS = ("equal groups mean that we multiply", "the same again and again is a product")
SUM_LEADS = ("we work out", "it says", "the paper has", "here is", "our task is")
UNITS = {
    ("hours", "minutes"): 60,
    ("days", "hours"): 24,
    ("weeks", "days"): 7,
    ("dozens", "pieces"): 12,
    ("feet", "inches"): 12,
    ("years", "months"): 12,
    ("meters", "centimeters"): 100,
    ("minutes", "seconds"): 60,
}
"""(unit, smaller unit) -> how many of the smaller make one."""

OPENINGS = (
    "Let us take this one step at a time.",
    "Sure, here is how to work it out.",
    "We go through it slowly and write everything down.",
    "Fine, this is a good one to do by hand.",
    "Here is one way to see it.",
    "Okay, we begin with what we are told.",
    "To solve this we only need a little patience.",
    "Happy to help with that.",
    "This can be done in a few short steps.",
    "Certainly, let me show the whole work.",
    "Good question, and not a hard one.",
    "First of all we read the task again.",
    "I will write down every step of the way.",
    "Right, nothing here is as hard as it looks.",
    "Now then, pencil and paper are all that we need.",
    "Gladly, and we can check it at the end.",
)
LEADS = (
    "Next,",
    "Then,",
    "After that,",
    "Going on from there,",
    "In the following step,",
    "With that in mind,",
    "Now,",
    "From here,",
    "Moving along,",
    "As a next step,",
    "Without any hurry,",
    "Once more,",
)
ITEM_LEADS = (
    "next in line is",
    "then we come to",
    "after that there is",
    "now it is the turn of",
    "right behind it follows",
    "the one to write down is",
    "on we go with",
    "going along we get",
    "what comes now is",
    "in its place we put",
)
ASIDES = (
    "Picture a {size} {colour} {furniture} by the {place}.",
    "It helps to think of a {size} {furniture} near the {place}.",
    "A {colour} {animal} could not do it faster.",
    "Keep that number on the {colour} {furniture}.",
    "My {size} {animal} likes this part best.",
    "Some people draw a {colour} {animal} at the {place} here.",
    "You may put it on a {size} {colour} {furniture} for now.",
    "Old teachers at the {place} used a {colour} {furniture} for this.",
)
CLOSINGS = (
    "That is all there is to it.",
    "So the work is done.",
    "And with this we are at the end.",
    "Nothing more is needed.",
    "Everything fits together.",
    "It is easy to check this once more.",
    "Well, that was not so hard.",
    "This settles the question.",
    "We can put the pencil down.",
    "Hence there is nothing left to do.",
)
