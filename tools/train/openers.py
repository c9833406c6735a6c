"""First words of user turns, written for this project: they spread the target's own prompts over more of
what people ask than it would think of by itself.

A line ends where the target goes on, or is a whole question (it ends in `?` or `.`). `{a}` to `{d}` become
random numbers. None is taken from a benchmark.
"""

from __future__ import annotations

import random

CHAT = """
What is|What are the|What does|What would happen if|What makes|What should I|Who was|Who invented
Who wrote|When did|When should|Where can I|Where is|Why do|Why does|Why is|Why are|How do I|How can I
How does|How is|How would you|How many|How long does it take to|Can you explain|Can you help me
Can you tell me|Could you|Explain|Explain how|Explain why|Explain to a child|Describe|Describe the
Describe a|Tell me about|Tell me a story about|Tell me a joke about|Give me|Give me five
Give me a list of|Give an example of|List three|List the|Name three|Compare|Compare and contrast
What is the difference between|Summarize|Summarize the following text:|Rewrite the following sentence:
Rewrite this paragraph in a formal tone:|Translate the following into French:
Correct the grammar in this sentence:|Paraphrase:|Classify the following|Write a short story about
Write a poem about|Write a haiku about|Write a letter to|Write an email to
Write a product description for|Write a blog post about|Write a speech|Write a dialogue between
Write a paragraph about|Write a review of|Write a summary of|Write an essay on|Write a news article about
Imagine you are|Imagine a world where|Pretend you are|Suppose that|You are a|Act as a|I am a|I'm a|I have
I want to|I need help with|I would like to|I feel|I'm writing|I'm planning a trip to|I'm trying to
My friend|My boss|My dog|My computer|Please|Please help me|Please suggest|Suggest|Recommend a
Recommend some books about|Plan a|Plan a weekend in|Create a|Create a recipe for
Create a workout plan for|Design a|Develop a|Generate a|Invent a|Brainstorm|Make a list of|Make up a
Outline|Discuss|Discuss the|Analyze|Analyze the|Evaluate|Argue for|What is the capital of
What are the benefits of|What are some ways to|What is your opinion on|What causes|What are the main
How has|In what way|Is it true that|Is it safe to|Should I|Do you know|Does|Did|Are there|Hello|Hi
Hello, I|Hi! Can you|Good morning|Thanks! Now|That is interesting.|Let's talk about|Help me
Help me understand|Teach me|Define|Define the word|Complete the sentence:|Fill in the blank:
Convince me that|What happened|In history,|In biology, what is|In physics,|In economics,|In cooking,
"""

CODE = """
Write a Python function|Write a Python function that|Write a Python function to|Write a Python program to
Write a Python script that|Write a Python class|Write Python code to|Write a function that takes a list
Write a function that takes a string and|Write a function that returns|Write a function called
Write a recursive function|Write a JavaScript function|Write a SQL query|Write a bash script
Write a C program|Write a C++ function|Write a Java method|Write a Rust function|Write an HTML page
Write a CSS rule|Write a regular expression|Write a unit test for|Write a docstring for
Write pseudocode for|Implement a|Implement a stack|Implement binary search|Implement a queue in Python
Implement a linked list|Complete this Python function:\\n\\ndef |Complete the following code:\\n\\n
Finish this function:\\n\\ndef|Fix the bug in this code:\\n\\n|What does this code do?\\n\\n
Explain this code:\\n\\n|Refactor this code:\\n\\n|Explain what a|How do you reverse a
How do I sort a list|How do I read a file in Python|How do I use|In Python, how|In Python, what is
In JavaScript, how|In SQL, how|What is a pointer|What is recursion|What is the time complexity of
Create a Python dictionary|Create a class in Python|def |import |for i in range(
Convert this Python code to|Optimize this function:|Debug:|Given a list of integers,|Given a string,
Given two sorted arrays,|Check if a number is|Find the largest|Count the number of|Remove duplicates from
"""

ARITHMETIC = """
What is {a} + {b}?|What is {c} - {a}?|What is {a} times {b}?|What is {a} x {b}?
Calculate {a} + {b} + {d}.|Calculate {c} divided by {a}.|Compute {a} * {b}.|What is {a}% of {c}?
What is {d} squared?|Solve for x:|Solve for x: {a}x + {b} = {c}|Solve the equation|Solve:|Simplify
Find the area of a|Find the perimeter of a|Find the average of {a}, {b} and {d}.
Convert {a} miles to kilometers.|Round {c} to the nearest hundred.
A train travels {a} miles in {d} hours.|A car travels at|A store sells|A baker|A farmer has {a}|A shop
A rectangle has a length of {a}|A class has {a} students|A recipe|A book has {c} pages.|A box holds {a}
Tom has {a}|Anna has {a}|Maria buys {d}|John has {a} apples|Sam earns ${a}|Lily is {a} years old
There are {c}|If a|If I have {a}|If x = {a}|If {d} workers|If a shirt costs ${a}|Each|Every day|In a
The sum of|The price of|How much is|How many minutes are in {d} hours?|How many|Two trains|Three friends
What number|Add {a} and {b}.|Subtract {a} from {c}.|Multiply {a} by {d}.|Divide {c} by {d}.
What is the next number in the sequence {d}, {a},
"""


def draw_opener(rng: random.Random) -> str:
    """First words of a user turn: half general, a quarter each of code and arithmetic."""
    group = rng.choices((CHAT, CODE, ARITHMETIC), weights=(2, 1, 1))[0]
    words = rng.choice(_split(group))
    for name, top in (("{a}", 99), ("{b}", 99), ("{c}", 999), ("{d}", 12)):
        words = words.replace(name, str(rng.randint(2, top)))
    return words


def _split(group: str) -> list[str]:
    """Openers of a group: bars and line ends separate them, `\\n` stands for a line end inside one."""
    lines = group.replace("|", "\n").splitlines()
    return [line.replace("\\n", "\n") for line in lines if line]
