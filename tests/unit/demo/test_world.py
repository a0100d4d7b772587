"""The generated world: what is held out is held out, and nothing can be guessed from where it stands."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path

from models.demo.world import handbook, questions, statements, tasks
from models.demo.world.conversations import Message, Shape, conversation
from models.demo.world.names import pool_of
from models.demo.world.relations import RELATIONS

ROOT = Path(__file__).resolve().parents[3]
SHAPES = (
    Shape((5, 5), (2, 4), (6, 8), page=0.7),
    Shape((1, 5), (1, 3), (3, 6), page=0.5, small_talk=0.2, regroup=0.5),
)


@cache
def trained_on(count: int = 300) -> list[list[Message]]:
    """Return a sample of training conversations."""
    return [
        conversation(random.Random(f"sample {i}"), SHAPES[i % len(SHAPES)]) for i in range(count)
    ]


def passages_in(messages: list[Message]) -> set[str]:
    """Return the passages of grounded turns, without their numbers."""
    return {
        line.split("] ", 1)[1]
        for m in messages
        if m.role == "user"
        for line in m.content.splitlines()
        if line.startswith("[")
    }


@cache
def evaluated_on(count: int = 120) -> list[tasks.Task]:
    """Return a sample of every kind of evaluation question."""
    made = [tasks.present(i) for i in range(count)] + [tasks.absent(i) for i in range(count)]
    return made + [tasks.turn(i, 3) for i in range(count)]


def test_the_world_is_as_large_as_promised() -> None:
    """At least 12 relations, each with at least 40 phrasings of the question, 8 of them held out."""
    assert len(RELATIONS) >= 12
    for relation in RELATIONS:
        train, held = questions.split(relation)

        assert len(questions.phrasings(relation)) >= 40
        assert len(held) == 8
        assert not set(train) & set(held)


def test_pools_share_no_name() -> None:
    """Every name on an evaluation passage, and every name in the handbook, is in no training name."""
    spoken: set[str] = set()
    for messages in trained_on():
        for m in messages:
            spoken |= {w.strip(".,?:'#[]") for w in m.content.split() if w[:1].isupper()}
    owned = {w.removesuffix("'s") for w in spoken}
    entities = {t.expected.split(" of ")[1].split(" is ")[0] for t in evaluated_on() if t.value}
    first = {e.split()[0] for e in entities}

    assert len(first) > 120
    assert {pool_of(name) for name in first} == {"evaluation"}
    assert not first & owned
    pages = {p.who.name.split()[0] for p in handbook.pages()}
    assert {pool_of(name) for name in pages} == {"handbook"}
    assert not pages & owned


def test_no_evaluation_passage_is_in_training() -> None:
    """Samples of both, and the whole handbook, share no passage."""
    trained = set().union(*(passages_in(m) for m in trained_on()))
    evaluated = set().union(*(passages_in(t.prompt) for t in evaluated_on()))
    pages = {" ".join(p.text.split()) for p in handbook.pages()}

    assert min(len(trained), len(evaluated)) > 1000
    assert not trained & (evaluated | pages)


def test_held_out_phrasings_are_never_trained_on() -> None:
    """No training question, with its names put back to slots, is a held-out phrasing; nor a statement."""
    held_statements = set()
    for relation in RELATIONS:
        trained = statements.named(relation, held_out=False)
        assert not set(trained) & set(statements.named(relation, held_out=True))
        trained = statements.referred(relation, held_out=False)
        assert not set(trained) & set(statements.referred(relation, held_out=True))
        held_statements |= {
            tuple(part for part in s.split("{e}")) for s in questions.split(relation)[1]
        }
    for messages in trained_on():
        for m in messages:
            asked = m.content.rsplit("Question: ", 1)[-1]
            for parts in held_statements:
                if len(parts) == 2 and asked.startswith(parts[0]) and asked.endswith(parts[1]):
                    middle = asked[len(parts[0]) : len(asked) - len(parts[1])]
                    # What is left must be more than a name: another phrasing that begins and ends alike.
                    assert not middle.removeprefix("the ").istitle(), asked


def test_places_are_uniform() -> None:
    """The answering passage stands at each of the five places equally often, exactly so in evaluation."""
    places = Counter(tasks.present(i).cite for i in range(500))

    assert places == dict.fromkeys(range(1, 6), 100)
    cited: Counter[str] = Counter()
    for i in range(1000):
        talk = conversation(random.Random(i), Shape((5, 5), (1, 3), (1, 1), refuse=0.0))
        cited[talk[-1].content.split("[")[1][0]] += 1
    assert set(cited) == set("12345")
    assert max(cited.values()) < 1.4 * min(cited.values())


def test_questions_are_the_same_each_time_and_share_no_stream() -> None:
    """A task is a function of its index alone; training's random numbers do not move it."""
    before = tasks.turn(7, 3)
    random.seed(1)
    conversation(random.Random(0), SHAPES[0])

    assert tasks.turn(7, 3) == before


def test_refusals_are_asked_for_where_passages_do_not_say() -> None:
    """In half of the absent questions the entity is there, in half the relation is; the value never is."""
    for i in range(100):
        task = tasks.absent(i)
        assert task.value is None
        assert task.expected.endswith(" is not in the passages.")
        assert tasks.score(task, "The passages do not say.").exact
        assert not tasks.score(task, task.expected + " [1]").exact


def test_scores_tell_value_passage_and_letter_apart() -> None:
    """Exact is the value and nothing else; the citation and the wording are told apart."""
    task = tasks.present(0)
    assert task.value is not None
    right = tasks.score(task, task.expected)
    wrong_passage = tasks.score(task, task.expected.replace(f"[{task.cite}]", "[9]"))

    assert right == tasks.Score(exact=True, cited=True, whole=True)
    assert wrong_passage == tasks.Score(exact=True, cited=False, whole=False)
    longer = task.expected.replace(task.value, f"{task.value} or so")
    assert not tasks.score(task, longer).exact
    assert not tasks.score(task, "The passages do not say.").exact


def test_the_handbook_is_the_same_everywhere(tmp_path: Path) -> None:
    """300 pages, each about one entity and one retrieval chunk long, asked about in unseen phrasings."""
    assert handbook.write_handbook(tmp_path) == 300
    texts = [p.read_text() for p in sorted(tmp_path.glob("*.md"))]
    assert len(texts) == 300
    assert all(25 <= len(t.split()) <= 65 for t in texts)
    names = [p.who.name for p in handbook.pages()]
    assert len(set(names)) == 300
    for q in handbook.questions(300):
        page = next(p for p in handbook.pages() if p.name == q.page)
        assert page.text.startswith(f"# {page.who.name}\n")
        assert q.value in page.text
    missing = list(handbook.absent_questions(200))
    assert not any(name in text for name in names for text in missing)
