"""The parent's side of all sessions: who may join, what was sent, who has answered."""
