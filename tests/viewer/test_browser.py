"""The viewer as a person uses it, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.async_api import Page
from tests.support.viewed_runs import STANDING, write_league_run, write_run

from kapelle.cli import main
from kapelle.services.binding import Binding
from kapelle.services.http import HttpServer
from kapelle.viewer.library import Library
from kapelle.viewer.server import viewer


def saved_bytes(path: Path) -> bytes:
    """Return what a download holds."""
    return path.read_bytes()


pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]


async def test_runs_are_listed_filtered_sorted_and_opened_by_key(page: Page) -> None:
    await page.goto("/")
    names = page.locator("#runs tbody tr:visible .name")
    assert (await names.count()) == 3
    await page.keyboard.press("/")
    await page.keyboard.type("mappo")
    assert (await names.all_inner_texts()) == ["other/pair-0"]
    assert page.url.endswith("?q=mappo")
    await page.locator("#filter").fill("")
    await page.get_by_role("button", name="step", exact=True).click()
    assert (await page.locator("th[aria-sort=descending]").inner_text()).startswith("step")
    await page.keyboard.press("j")
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/run/*")


async def test_curves_are_drawn_with_their_last_numbers(page: Page) -> None:
    await page.goto("/run/pair-0")
    panel = page.locator("figure[data-name=reward]")
    await panel.locator("canvas").wait_for()
    assert (await panel.locator("li").all_inner_texts()) == ["solver\n0.4", "critic\n−0.6"]
    await page.locator("select[name=x]").select_option("time")
    assert "x=time" in page.url
    await page.locator("input[name=q]").fill("entropy")
    assert (await page.locator("figure:visible").count()) == 1


@pytest.mark.long
async def test_runs_are_grouped_zoomed_hidden_and_saved(page: Page) -> None:
    await page.goto("/")
    await page.locator("#every").check()
    await page.locator("#overlay").click()
    figure = page.locator("figure[data-name=reward]")
    await figure.locator("canvas").wait_for()  # the page's scripts have run
    await page.locator("select[name=by]").first.select_option("optimizer.lr")
    await page.wait_for_url("**by=optimizer.lr**")
    await figure.locator("canvas").wait_for()
    legend = figure.locator(".legend button")
    assert "optimizer.lr 0.001, mean of 2" in (await legend.first.inner_text())
    await legend.first.click()
    pressed = page.locator(".legend button[aria-pressed=false]")
    assert {await button.get_attribute("data-key") for button in await pressed.all()} == {
        await legend.first.get_attribute("data-key")
    }, "in every panel"
    place = await figure.locator(".u-over").bounding_box()
    assert place is not None
    across = [place["x"] + share * place["width"] for share in (0.25, 0.75)]
    await page.mouse.move(across[0], place["y"] + 20)
    await page.mouse.down()
    marked = figure.locator(".u-select")
    for k in range(20):  # a busy browser may omit a movement
        await page.mouse.move(across[1] - k, place["y"] + 20 + k, steps=4)
        if await marked.evaluate("each => each.offsetWidth") > 20:
            break
    await page.mouse.up()
    await page.wait_for_url("**zoom=**", wait_until="commit")
    await page.locator("input[name=log]").check()
    assert "log=1" in page.url
    for form, start in (("csv", b'"step","solver'), ("svg", b"<svg xmlns="), ("png", b"\x89PNG")):
        await figure.locator(".save summary").click()
        async with page.expect_download() as saved:
            await figure.locator(f"[data-form={form}]").click()
        file = await saved.value
        assert file.suggested_filename == f"reward.{form}"
        assert saved_bytes(await file.path()).startswith(start)
    await page.locator("button[name=reset]").click()
    assert "zoom=" not in page.url


async def test_an_episode_is_searched_opened_and_read_as_an_agent(page: Page) -> None:
    await page.goto("/run/pair-0/episodes")
    await page.keyboard.press("/")
    await page.keyboard.type("carry 5")
    await page.locator("select[name=outcome]").select_option("wrong")
    await page.get_by_role("button", name="Show").click()
    await page.wait_for_url("**outcome=wrong**")
    rows = page.locator("tbody tr")
    assert await rows.count() == 2
    await page.keyboard.press("j")
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/episode/train/5/1")
    assert await page.locator("article.turn").count() == 2
    assert "read by critic" in await page.locator("#turn-0 footer").inner_text()
    await page.get_by_role("link", name="critic", exact=True).click()
    await page.wait_for_url("**as=critic**")
    assert await page.locator(".hidden-turn").count() == 0, "the critic read the solver's turn"
    await page.get_by_role("link", name="solver", exact=True).click()
    await page.wait_for_url("**as=solver**")
    assert "not read by solver" in await page.locator("#turn-1").inner_text()
    await page.wait_for_load_state()  # keys are heard once the scripts are there
    await page.keyboard.press("]")
    await page.wait_for_url("**/episode/train/5/2")
    await page.get_by_role("link", name="side by side").click()
    await page.wait_for_url("**/together?**")
    assert await page.locator(".beside section").count() == 2


async def test_a_verdict_links_its_curve_and_the_advice(page: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    rows = (
        {"step": k + 1, "success": 0.4 * (k < 1), "scored": 64.0, "dead_groups": float(k > 0)}
        for k in range(12)
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "distributions.jsonl").write_text('{"step": 1, "reward/solver": [-1, 0, [1, 0, 3]]}\n')
    with HttpServer(Binding(), viewer(Library([tmp_path]), Binding())) as server:
        await page.goto(f"{server.url}/run/run")
        await page.locator("html[data-ready]").wait_for(state="attached")
        await page.locator("#verdict a", has_text="curve").last.click()
        assert page.url.endswith("#panel-dead_groups")
        drawn = page.locator("#distributions[data-ready] figure")
        assert await drawn.locator(".said").all_inner_texts() == [
            "step 1: 4 values, median in 1 to 1.5, 75 % in 1 to 1.5"
        ]
        box = await drawn.locator("canvas").bounding_box()
        assert box is not None
        await drawn.locator("canvas").hover(
            position={"x": box["width"] / 2, "y": 70 + 24}
        )  # three bins of 24, around the middle
        assert await drawn.locator(".said").inner_text() == "step 1, 0 to 0.5: 25 % of 4"
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 13, "success": 0.0, "dead_groups": 1.0}\n')
        await page.locator("#verdict", has_text="12 of 13 steps").wait_for()
        await page.get_by_role("link", name="All verdicts").click()
        await page.wait_for_url("**/advice#diverging")
        await page.goto("about:blank")


async def test_the_numbers_of_a_token_are_shown_for_pointer_and_keys(page: Page) -> None:
    await page.goto("/run/pair-0/episode/train/5/1")
    await page.locator("#turn-0 details summary", has_text="tokens by id").click()
    await page.locator("#turn-0 .t").nth(1).hover()
    assert "log-prob −0.1 (90.5 %)" in await page.locator("#reading").inner_text()
    await page.locator("#turn-0 .t").first.focus()
    for _ in range(2):
        await page.keyboard.press("ArrowRight")
    assert "log-prob −0.2" in await page.locator("#reading").inner_text()
    assert await page.locator("#turn-0 .t").nth(6).get_attribute("class") != "t"
    await page.locator("#color").select_option("advantage")
    assert "not recorded" in await page.locator("#scale").inner_text()
    assert "color=advantage" in page.url


async def test_an_exported_page_needs_no_server(page: Page, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert main(["view", str(runs / "pair-0"), "--export", str(file)]) == 0
    assert main(["view", str(runs / "pair-0"), "--export", str(file)]) == 2, (
        "what is there is not written over"
    )
    outside: list[str] = []
    page.on("request", lambda request: outside.append(request.url))
    await page.goto(file.as_uri())
    await page.locator("figure[data-name=reward] canvas").wait_for()
    assert await page.locator("article.turn").count() == 8
    await page.locator("#color").select_option("advantage")
    assert outside == [file.as_uri()]


async def test_a_curve_grows_when_a_step_is_written(page: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "live", steps=2)
    with HttpServer(Binding(), viewer(Library([tmp_path]), Binding())) as server:
        await page.goto(f"{server.url}/run/live")
        await page.locator("html[data-ready]").wait_for(state="attached")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "success": 0.125, "reward/solver": 7.5, "reward/critic": 1.0}\n')
        await page.locator("html[data-step='3']").wait_for(state="attached")
        assert await page.locator("figure[data-name=reward] li").all_inner_texts() == [
            "solver\n7.5",
            "critic\n1",
        ]
        assert await page.locator("[data-figure=success]").inner_text() == "12.5 %"
        await page.locator("figure[data-name=reward] .why").click()
        await page.evaluate("scrollTo(0, 400)")
        await page.evaluate(
            "getSelection().selectAllChildren(document.querySelector('figure[data-name=reward] h3'))"
        )
        with (run / "evaluations.jsonl").open("a") as file:
            file.write('{"step": 3, "success": 0.5, "interval": [0.4, 0.6]}\n')
        await page.locator("[data-figure=measured] b", has_text="50.0 %").wait_for()
        await page.locator("figure[data-name=success] li", has_text="unseen problems, 95 %0.5").wait_for()
        assert await page.evaluate("getSelection().toString()") == "reward", "what is selected stays so"
        before = await page.locator("figure[data-name=reward]").bounding_box()
        with (run / "metrics.jsonl").open("a") as file:  # a name that is new: the page draws everything again
            file.write('{"step": 4, "success": 0.125, "novelty": 1.0}\n')
        await page.locator("figure[data-name=novelty]").wait_for(state="attached")
        await page.locator("html[data-step='4']").wait_for(state="attached")
        now = await page.locator("figure[data-name=reward]").bounding_box()
        assert before is not None
        assert now is not None
        assert now["y"] == pytest.approx(before["y"], abs=2), "a reader stays where she reads"
        assert await page.locator("figure[data-name=reward] .note").is_visible(), "what was unfolded stays so"
        await page.goto("about:blank")


async def test_the_page_of_a_league_has_curves_and_a_ladder(page: Page, tmp_path: Path) -> None:
    write_league_run(tmp_path / "run", STANDING | {"results": [["self@4", "self@0", 10, 0, 0]]})
    with HttpServer(Binding(), viewer(Library([tmp_path]), Binding())) as server:
        await page.goto(f"{server.url}/run/run")
        await page.get_by_role("link", name="League").click()
        await page.locator("figure[data-name='league/rating'] canvas").wait_for()
        rating = page.locator("figure[data-name='league/rating'] li")
        assert await rating.all_inner_texts() == ["newest member\n120"]
        first = page.locator("table.ladder tbody tr").first
        assert (await first.inner_text()).split("\t")[:5] == [
            "self@4",
            "past self",
            "step 4",
            "+120",
            "+60 to +181",
        ]
        await page.goto("about:blank")
