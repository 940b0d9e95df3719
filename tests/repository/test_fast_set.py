"""`make test-fast` runs something of every module: tests that are not marked `slow`.

A module has a test there when a file of its room does (`environments/nli.py`: `tests/environments/test_nli.py`), when a
file of tests imports or names it, or when `REACHED` says which test calls it on its way.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.repository.rules import generated
from tests.repository.test_held_by import missing

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "kapelle"
TESTS = ROOT / "tests"

REACHED = {
    "kapelle.cli.unknown_words": "tests/cli/test_parser.py::test_words_that_mean_nothing_are_one_line_and_exit_code_2",
    "kapelle.setup.recipe_faults": "tests/settings/test_messages.py::test_a_class_that_lacks_methods_is_told_which",
    "kapelle.models.fitting": "tests/cli/test_validate_models.py::test_weights_that_are_cut_off_are_found_before_they_are_loaded",
    "kapelle.setup.looking_into": "tests/cli/test_validate_models.py::test_weights_that_are_cut_off_are_found_before_they_are_loaded",
    "kapelle.setup.prompts": "tests/cli/test_validate_models.py::test_weights_that_are_cut_off_are_found_before_they_are_loaded",
    "kapelle.runs.opening": "tests/runs/test_writer.py::test_a_new_run_has_every_file_of_the_documentation",
    "kapelle.runs.traces": "tests/runs/test_writer.py::test_a_new_run_has_every_file_of_the_documentation",
    "kapelle.training.system": "tests/training/test_tracing.py::test_every_step_says_what_the_machine_was_doing",
    "kapelle.cli.environments": "tests/cli/test_serve_environments.py::test_environments_are_named_with_their_settings",
    "kapelle.environments.elsewhere": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.environments.remote.environment": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.environments.remote.line": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.environments.remote.register": "tests/cli/test_serve_environments.py::test_what_cannot_be_served_is_one_line",
    "kapelle.environments.remote.server": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.environments.remote.servers": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.environments.remote.world": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.rollout.workers.session": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.services.environments.answers": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.services.environments.control": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.services.environments.service": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.services.environments.sessions": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.services.environments.shelf": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.services.environments.stream": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.wire.values": "tests/environments/remote/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.cli.listening": "tests/cli/test_view.py::test_what_cannot_be_shown_is_one_line",
    "kapelle.cli.view_arguments": "tests/cli/test_view.py::test_what_cannot_be_shown_is_one_line",
    "kapelle.viewer.about_runs": "tests/viewer/test_server.py::test_every_page_comes_with_the_policy",
    "kapelle.viewer.team_map": "tests/viewer/test_server.py::test_every_page_comes_with_the_policy",
    "kapelle.viewer.answering": "tests/viewer/test_server.py::test_what_is_not_there_is_said_in_words",
    "kapelle.viewer.browsing": "tests/viewer/test_server.py::test_every_page_comes_with_the_policy",
    "kapelle.viewer.index_tables": "tests/viewer/test_index.py::test_conditions_hold",
    "kapelle.viewer.episode_lines": "tests/viewer/test_skimming.py::test_the_first_pages_need_no_index",
    "kapelle.viewer.meetings": "tests/viewer/test_league.py::test_a_pair_wins_draws_and_loses",
    "kapelle.viewer.ratings": "tests/viewer/test_league.py::test_who_no_game_links_is_not_compared",
    "kapelle.viewer.newest": "tests/viewer/test_skimming.py::test_the_first_pages_need_no_index",
    "kapelle.viewer.following": "tests/viewer/test_server.py::test_a_step_is_told_when_it_is_written",
    "kapelle.viewer.guarding": "tests/viewer/test_server.py::test_every_page_comes_with_the_policy",
    "kapelle.viewer.traffic": "tests/viewer/test_server.py::test_every_page_comes_with_the_policy",
    "kapelle.viewer.traces": "tests/viewer/test_server.py::test_every_page_comes_with_the_policy",
    "kapelle.algorithms.shared.gae": "tests/algorithms/test_ppo.py::TestTwoTurns::test_by_hand",
    "kapelle.algorithms.shared.payments": "tests/algorithms/shared/test_rewards.py::TestTerminal::test_three_agents",
    "kapelle.algorithms.shared.tree": "tests/algorithms/test_reward_model.py::TestRefused::test_a_tree_of_candidates",
    "kapelle.cli.chat": "tests/cli/test_chat.py::test_turns_of_one_moment_are_printed_one_after_another",
    "kapelle.cli.data": "tests/environments/data/test_preparation.py::test_a_command_writes_them_and_says_how_to_train",
    "kapelle.cli.data_arguments": "tests/environments/data/test_preparation.py::test_a_command_writes_them_and_says_how_to_train",
    "kapelle.cli.launch_arguments": "tests/cli/test_launch.py::test_a_script_is_written_once",
    "kapelle.cli.play_exact": "tests/environments/test_mixture_games.py::test_exact_values_are_given_for_the_games_that_have_them",
    "kapelle.cli.player": "tests/cli/test_eval.py::test_games_are_measured_by_rewards",
    "kapelle.cli.quiet": "tests/cli/test_graph.py::test_a_wrong_workflow_file_is_one_line",
    "kapelle.cli.ray": "tests/cluster/test_guard.py::test_without_ray_one_line_says_what_to_install",
    "kapelle.cli.recipes": "tests/cli/test_looking.py::test_a_copied_recipe_is_the_recipe",
    "kapelle.cli.serve": "tests/cli/test_serve.py::test_what_cannot_be_served_is_one_line",
    "kapelle.cli.serve_arguments": "tests/cli/test_serve.py::test_what_cannot_be_served_is_one_line",
    "kapelle.cli.source": "tests/cli/test_graph.py::test_who_reads_whom",
    "kapelle.cli.staged": "tests/cli/test_train.py::test_what_cannot_be_resumed_is_said",
    "kapelle.cli.validate": "tests/cli/test_validate_environment.py::test_an_unknown_name_is_still_an_unknown_recipe",
    "kapelle.conformance.__main__": "tests/environments/test_conformance.py::test_a_sound_environment_has_no_finding_against_it",
    "kapelle.conformance.driving": "tests/cli/test_validate_environment.py::test_a_sound_environment_is_fit_for_training",
    "kapelle.conformance.finding": "tests/environments/test_conformance.py::test_a_secret_that_another_agent_sees_is_found",
    "kapelle.conformance.solutions": "tests/environments/test_mixture.py::test_it_conforms",
    "kapelle.conformance.tasks": "tests/environments/test_mixture_games.py::test_it_conforms",
    "kapelle.conformance.worlds": "tests/environments/test_nli.py::test_it_conforms_and_is_voted_on",
    "kapelle.engines.rollout.gathering": "tests/engines/rollout/test_contract.py::TestAnswers::test_each_request_gets_its_own_answer",
    "kapelle.engines.rollout.local.decode_batch": "tests/engines/rollout/local/test_engine.py::TestFaults::test_everybody_hears_of_a_failure_and_the_engine_goes_on",
    "kapelle.engines.rollout.local.padded_rows": "tests/engines/rollout/local/test_decode.py::test_the_lean_pass_says_what_transformers_says",
    "kapelle.engines.train.fsdp.sharded": "tests/engines/train/fsdp/test_engine.py::test_its_state_is_whole_and_goes_to_the_engine_torch_and_back",
    "kapelle.engines.train.parity": "tests/engines/train/torch/test_engine.py::TestParity::test_the_bound_can_be_said",
    "kapelle.engines.train.torch.forward": "tests/engines/train/torch/test_engine.py::TestGradient::test_packed_and_split_it_is_that_of_each_sequence_alone",
    "kapelle.engines.train.torch.learners": "tests/engines/train/torch/test_isolation.py::TestIsolation::test_only_who_learns_changes",
    "kapelle.engines.train.torch.sharing": "tests/engines/train/torch/test_engine.py::TestGradient::test_the_step_is_the_same_for_any_split",
    "kapelle.engines.train.torch.update": "tests/engines/train/torch/test_engine.py::TestGradient::test_the_step_is_the_same_for_any_split",
    "kapelle.environments.adapters.siirl_env": "tests/workflows/test_dag_own_files.py::test_rewards_without_the_class_are_those_of_the_questions",
    "kapelle.environments.adapters.stepping": "tests/environments/adapters/test_plain.py::test_a_plain_class_is_played_to_its_end",
    "kapelle.environments.code.world": "tests/environments/code/test_environment.py::test_tests_that_cannot_be_run_fail_the_episode",
    "kapelle.environments.data.row_fields": "tests/environments/code/test_environment.py::test_a_row_of_another_form_is_named",
    "kapelle.environments.data.settings": "tests/environments/test_math.py::test_grading",
    "kapelle.environments.endless": "tests/environments/adapters/test_plain.py::test_a_plain_class_is_played_to_its_end",
    "kapelle.environments.flaws": "tests/environments/test_arithmetic.py::test_flaws_have_the_stated_share_and_are_independent_of_each_other",
    "kapelle.environments.external.environment": "tests/services/policy/test_outside.py::test_a_program_that_knows_nothing_of_tasks_is_given_one_by_its_first_call",
    "kapelle.environments.external.program": "tests/services/policy/test_outside.py::test_a_program_that_knows_nothing_of_tasks_is_given_one_by_its_first_call",
    "kapelle.environments.external.switchboard": "tests/services/policy/test_outside.py::test_a_program_that_knows_nothing_of_tasks_is_given_one_by_its_first_call",
    "kapelle.environments.external.world": "tests/services/policy/test_outside.py::test_a_program_that_knows_nothing_of_tasks_is_given_one_by_its_first_call",
    "kapelle.environments.graded": "tests/environments/test_math.py::test_grading",
    "kapelle.environments.inner_questions": "tests/environments/test_tool_questions.py::test_steps_that_make_no_sense",
    "kapelle.environments.tools.mcp_process": "tests/environments/tools/test_mcp.py::test_results_are_texts_and_the_process_stays",
    "kapelle.environments.tools.prompt": "tests/environments/test_tool_questions.py::test_the_whole_prompt_is_as_stated",
    "kapelle.environments.tools.python_driver": "tests/environments/tools/test_python.py::test_variables_stay_and_the_last_value_is_shown",
    "kapelle.environments.tools.world": "tests/environments/test_tool_questions.py::test_an_agent_calls_reads_and_answers",
    "kapelle.grading.code.candidate_driver": "tests/grading/code/test_output.py::test_a_candidate_that_is_lost_costs_the_next_call_nothing",
    "kapelle.grading.code.candidates": "tests/grading/code/test_output.py::test_keywords_and_every_type_reach_the_candidate",
    "kapelle.grading.code.remote": "tests/grading/code/test_grade.py::test_each_test_is_counted_by_itself",
    "kapelle.grading.code.rewriting": "tests/grading/code/test_grade.py::test_each_test_is_counted_by_itself",
    "kapelle.grading.code.test_driver": "tests/grading/code/test_grade.py::test_each_test_is_counted_by_itself",
    "kapelle.grading.code.verdict": "tests/grading/code/test_grade.py::test_each_test_is_counted_by_itself",
    "kapelle.grading.fork_server": "tests/grading/test_processes.py::test_an_answer_comes_back_and_nothing_else_does",
    "kapelle.grading.math.form": "tests/environments/test_math.py::test_equal_answers_have_one_normal_form_for_the_vote",
    "kapelle.grading.math.parts": "tests/grading/math/test_answers.py::test_the_same",
    "kapelle.grading.math.relations": "tests/grading/math/test_spellings.py::test_another_spelling_is_paid",
    "kapelle.grading.math.sameness": "tests/grading/math/test_answers.py::test_not_the_same",
    "kapelle.grading.math.spelling": "tests/grading/math/test_spellings.py::test_another_spelling_is_paid",
    "kapelle.grading.math.text": "tests/grading/math/test_answers.py::test_not_the_same",
    "kapelle.grading.math.values": "tests/grading/math/test_answers.py::test_the_same",
    "kapelle.grading.math.worker": "tests/grading/math/test_grade.py::test_what_only_the_library_knows",
    "kapelle.grading.text.formulas": "tests/grading/text/test_extraction.py::test_boxes",
    "kapelle.grading.text.reading": "tests/environments/test_math.py::test_grading",
    "kapelle.grading.text.regex_worker": "tests/grading/text/test_regex.py::test_the_whole_answer_matches",
    "kapelle.models.devices": "tests/algorithms/test_reward_model.py::TestPlace::test_a_device_of_its_own_means_weights_of_its_own",
    "kapelle.models.fast.routed": "tests/models/fast/test_blocks.py::test_only_what_trains_gets_a_gradient",
    "kapelle.models.paths": "tests/models/test_sealed.py::test_who_changed_it_takes_it_as_it_is",
    "kapelle.models.renderer_loading": "tests/setup/test_preparation.py::test_a_model_in_memory_stands_for_its_path",
    "kapelle.models.templates": "tests/models/test_renderer.py::TestWritten::test_a_completion_by_hand_ends_its_turn",
    "kapelle.planning.held": "tests/planning/test_plan.py::test_a_second_process_has_weights_of_its_own",
    "kapelle.planning.memory": "tests/planning/test_plan.py::test_exit_codes_say_whether_it_fits",
    "kapelle.planning.plan": "tests/planning/test_plan.py::test_exit_codes_say_whether_it_fits",
    "kapelle.planning.sampling": "tests/planning/test_plan.py::test_rows_are_tasks_times_episodes",
    "kapelle.planning.situation": "tests/planning/test_plan.py::test_a_step_is_played_without_weights",
    "kapelle.planning.update": "tests/planning/test_plan.py::test_what_fits_is_the_largest_that_fits",
    "kapelle.planning.workload": "tests/planning/test_plan.py::test_a_step_is_played_without_weights",
    "kapelle.rollout.scene": "tests/rollout/test_branching.py::TestFailures::test_none_left_is_the_episodes_error",
    "kapelle.rollout.workers.process": "tests/rollout/workers/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.rollout.workers.server": "tests/rollout/workers/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.cli.export": "tests/cli/test_export.py::test_what_cannot_be_exported_is_one_line",
    "kapelle.cli.export_arguments": "tests/cli/test_export.py::test_what_cannot_be_exported_is_one_line",
    "kapelle.runs.best": "tests/runs/test_best.py::test_a_name_says_which_checkpoint",
    "kapelle.runs.hub": "tests/runs/test_hub.py::test_offline_nothing_is_sent",
    "kapelle.runs.model_card": "tests/training/test_exporting.py::test_an_agent_that_is_not_there_is_named",
    "kapelle.runs.more_trackers": "tests/runs/test_trackers.py::test_mlflow_goes_on_with_the_run_that_it_began",
    "kapelle.runs.packed_rows": "tests/runs/test_step_rows.py::test_packed_steps_are_read_back_line_by_line",
    "kapelle.runs.recorded": "tests/runs/test_recorded.py::test_a_sound_run_has_lost_nothing",
    "kapelle.runs.step_rows": "tests/runs/test_step_rows.py::test_a_plain_file_of_a_step_comes_first",
    "kapelle.runs.step_writer": "tests/runs/test_step_writer.py::test_sixteen_steps_make_a_file",
    "kapelle.runs.tables": "tests/runs/test_writer.py::test_rows_are_read_back_exactly",
    "kapelle.runtime.characters": "tests/runtime/test_http.py::test_its_episode_fails_soon_and_the_others_go_on",
    "kapelle.runtime.closing": "tests/sandbox/test_pool.py::test_closing_frees_every_sandbox_that_waits",
    "kapelle.runtime.collecting": "tests/cli/test_train.py::test_supervised_training_needs_no_rewards",
    "kapelle.runtime.loose_threads": "tests/runtime/test_limits_left.py::test_a_task_left_behind_leaves_no_limit",
    "kapelle.runtime.manifest": "tests/runs/test_checkpoint_folder.py::test_a_manifest_of_any_other_form_is_a_damaged_one",
    "kapelle.runtime.seeds": "tests/runtime/test_http.py::test_its_episode_fails_soon_and_the_others_go_on",
    "kapelle.runtime.stepped": "tests/rollout/workers/test_same_episodes.py::test_a_game_is_the_same",
    "kapelle.runtime.tensor_files": "tests/runtime/test_randomness.py::test_the_random_generators_go_on_where_they_were",
    "kapelle.sandbox.cgroups": "tests/sandbox/test_cgroups.py::test_a_run_is_bounded_counted_killed_and_removed",
    "kapelle.sandbox.interpreter": "tests/setup/test_recipe_values.py::test_so_do_those_on_the_real_files",
    "kapelle.sandbox.machine": "tests/sandbox/test_machine.py::test_the_run_that_was_in_the_kernel_is_charged",
    "kapelle.sandbox.task_clock": "tests/sandbox/test_contract.py::test_a_signal_is_told_from_an_exit",
    "kapelle.sandbox.watching": "tests/sandbox/test_contract.py::test_a_signal_is_told_from_an_exit",
    "kapelle.sandbox.usage": "tests/sandbox/test_contract.py::test_a_signal_is_told_from_an_exit",
    "kapelle.services.grpc.installed": "tests/services/grpc/test_server.py::test_answers",
    "kapelle.services.log": "tests/services/grpc/test_server.py::test_a_failure_is_logged_by_its_type_and_place_without_its_words",
    "kapelle.services.http.application": "tests/services/policy/test_safety.py::test_every_route_is_behind_the_same_check",
    "kapelle.engines.rollout.local.alternatives": "tests/services/policy/test_service.py::test_the_likeliest_tokens_stand_beside_the_sampled_one",
    "kapelle.models.reward_model": "tests/services/reward/test_classifier.py::test_what_is_no_reward_model_is_refused",
    "kapelle.services.reward.grpc_service": "tests/services/reward/test_grpc.py::test_scores_are_those_of_http",
    "kapelle.services.reward.service": "tests/services/reward/test_service.py::test_scores_are_those_of_the_trainer",
    "kapelle.services.http.bodies": "tests/services/reward/test_service.py::test_a_call_that_makes_no_sense_is_refused_by_name",
    "kapelle.services.http.guard": "tests/services/policy/test_safety.py::test_every_route_is_behind_the_same_check",
    "kapelle.services.http.refusals": "tests/services/policy/test_safety.py::test_every_route_is_behind_the_same_check",
    "kapelle.services.http.server": "tests/services/policy/test_safety.py::test_every_route_is_behind_the_same_check",
    "kapelle.services.policy.admission": "tests/services/policy/test_service.py::test_an_agent_answers_with_the_tokens_its_own_weights_sample",
    "kapelle.services.policy.agents": "tests/services/policy/test_service.py::test_an_agent_answers_with_the_tokens_its_own_weights_sample",
    "kapelle.services.policy.asked": "tests/services/policy/test_streaming.py::test_a_teams_agents_are_heard_as_they_speak",
    "kapelle.services.policy.chat_form": "tests/services/policy/test_service.py::test_an_agent_answers_with_the_tokens_its_own_weights_sample",
    "kapelle.services.policy.chats": "tests/services/policy/test_service.py::test_an_agent_answers_with_the_tokens_its_own_weights_sample",
    "kapelle.services.policy.completions": "tests/services/policy/test_service.py::test_an_agent_answers_with_the_tokens_its_own_weights_sample",
    "kapelle.services.policy.conversation": "tests/services/policy/test_service.py::test_an_agent_answers_with_the_tokens_its_own_weights_sample",
    "kapelle.services.policy.engine_thread": "tests/services/policy/test_service.py::test_an_agent_answers_with_the_tokens_its_own_weights_sample",
    "kapelle.services.policy.outside": "tests/services/policy/test_outside.py::test_a_program_that_knows_nothing_of_tasks_is_given_one_by_its_first_call",
    "kapelle.services.policy.rewards": "tests/services/policy/test_recording.py::test_a_program_that_knows_nothing_of_sessions",
    "kapelle.services.policy.service": "tests/services/policy/test_service.py::test_an_agent_answers_with_the_tokens_its_own_weights_sample",
    "kapelle.services.policy.sessions": "tests/services/policy/test_recording.py::test_a_program_that_knows_nothing_of_sessions",
    "kapelle.services.policy.team_chats": "tests/services/policy/test_streaming.py::test_a_teams_agents_are_heard_as_they_speak",
    "kapelle.services.policy.teams": "tests/services/policy/test_streaming.py::test_a_teams_agents_are_heard_as_they_speak",
    "kapelle.settings.dictionaries": "tests/repository/test_typing.py::test_dictionaries_have_the_keys_of_the_settings",
    "kapelle.settings.keeping": "tests/repository/test_config_keys.py::test_the_keys_stay_surveyable",
    "kapelle.settings.messages": "tests/algorithms/test_dpo.py::test_ipo_takes_no_smoothing",
    "kapelle.settings.overlays": "tests/runs/test_two_trainers.py::test_stages_are_trained_by_one_process",
    "kapelle.settings.sections": "tests/workflows/test_dag_own_files.py::test_what_is_set_of_the_environment_is_set_of_its_questions",
    "kapelle.setup.environment_forms": "tests/rollout/workers/test_lost_workers.py::TestRefused::test_a_class_that_no_other_process_can_import",
    "kapelle.training.held_out": "tests/training/test_verifier_judging.py::TestHeldOut::test_a_run_measures_what_it_keeps_on_questions_that_it_never_played",
    "kapelle.training.progress": "tests/training/test_torn_steps.py::TestTorn::test_it_is_neither_saved_nor_gone_on_with",
    "kapelle.training.records": "tests/cli/test_train.py::test_a_recipe_is_trained_into_a_run_named_after_it",
    "kapelle.training.step_metrics": "tests/training/test_loop.py::TestWhatActedIsWhatLearns::test_trainer_and_sampler_agree_over_agents_turns_and_steps",
    "kapelle.training.step_play": "tests/training/test_loop_further_play.py::TestRedraw::test_groups_without_variance_are_other_tasks",
    "kapelle.training.step_start": "tests/training/test_torn_steps.py::TestTorn::test_an_error_before_anything_moved_leaves_the_step_before",
    "kapelle.early_stop": "tests/cli/test_stopping.py::test_ctrl_c_while_the_command_is_imported_is_one_line_too",
    "kapelle.settings.keywords": "tests/training/test_one_call.py::test_a_trainer_says_which_keyword_was_meant",
    "kapelle.training.summary": "tests/cli/test_report.py::test_a_stopped_run_has_no_accuracy_after",
    "kapelle.workflows.dag_paths": "tests/workflows/test_dag_file.py::test_a_number_of_samples_is_the_groups_size",
    "kapelle.workflows.external": "tests/services/policy/test_outside.py::test_a_program_that_knows_nothing_of_tasks_is_given_one_by_its_first_call",
    "kapelle.training.exporting": "tests/training/test_exporting.py::test_an_agent_that_is_not_there_is_named",
    "kapelle.training.gguf_ready": "tests/training/test_exporting.py::test_a_folder_is_what_the_converter_takes_or_the_reason_is_named",
    "kapelle.training.start_weights": "tests/training/test_start_weights.py::test_what_is_named_is_found",
    "kapelle.workflows.processing": "tests/workflows/test_dag_own_files.py::test_the_public_process_file_runs_as_it_is",
    "kapelle.workflows.templates": "tests/workflows/test_dag_file.py::test_it_lies_over_a_recipe_and_plays",
}
"""Module without a test file of its own → a quick test that calls it."""


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module that defines something, by its name."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        if generated(file):
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body):
            parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = file
    return found


def quick(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the quick tests of a file or a class, as pytest writes their names."""
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any("slow" in ast.unparse(each) for each in node.decorator_list):
            continue
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}::{name}" for name in quick(node.body))
        elif node.name.startswith("test_"):
            yield node.name


def named(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of ours, and what may be one, that a file imports or names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"kapelle(?:\.\w+)+", node.value)


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """The files of tests that hold a quick one."""
    found = {file: ast.parse(file.read_text(encoding="utf-8")) for file in TESTS.rglob("test_*.py")}
    return {file: tree for file, tree in found.items() if any(quick(tree.body)) and file != Path(__file__)}


def test_every_module_has_a_quick_test(trees: dict[Path, ast.Module]) -> None:
    known = {name for tree in trees.values() for name in named(tree)}
    left = [
        name
        for name, file in modules().items()
        if name not in known
        and name not in REACHED
        and TESTS / file.parent.relative_to(PACKAGE) / f"test_{file.stem}.py" not in trees
    ]
    assert left == [], "no test that is not marked `slow` names them: write one, or name one in REACHED"


@pytest.mark.parametrize("module", REACHED)
def test_who_reaches_a_module_is_there_and_quick(module: str, trees: dict[Path, ast.Module]) -> None:
    assert module in modules()
    path, _, test = REACHED[module].partition("::")
    assert missing(REACHED[module]) is None
    assert test in quick(trees[ROOT / path].body)


def test_slow_tests_are_told_from_quick_ones() -> None:
    text = "@pytest.mark.slow\ndef test_a(): ...\nclass TestB:\n    def test_c(self): ...\n    @pytest.mark.slow\n    def test_d(self): ..."
    assert list(quick(ast.parse(text).body)) == ["TestB::test_c"]
    assert {"kapelle.runs.lock", "kapelle.runs"} < set(
        named(ast.parse("from kapelle.runs import lock\nx = 'kapelle.cli.demo'"))
    )
