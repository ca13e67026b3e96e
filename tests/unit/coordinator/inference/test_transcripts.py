"""Transcripts: the prompt of a chat of a run without a template of its own."""

from __future__ import annotations

from coordinator.rules.run_file import ChatSettings
from coordinator.v1.replies import transcript


def test_a_conversation_is_a_transcript_and_braces_in_it_mean_nothing() -> None:
    turns = [("developer", "Be kind."), ("user", "{content} {0}"), ("assistant", "Yes")]
    assert transcript(ChatSettings(), turns) == (
        "System: Be kind.\nUser: {content} {0}\nAssistant: Yes\nAssistant:"
    )


def test_turns_of_every_role_have_their_form() -> None:
    chat = ChatSettings(
        system="S {content};", user="U {content};", assistant="A {content};", reply="A"
    )
    turns = [("system", "be kind"), ("user", "hi"), ("assistant", "yes"), ("tool", "3")]
    assert transcript(chat, turns) == "S be kind;U hi;A yes;A 3;A"
