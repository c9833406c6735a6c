"""How captured hidden states reach the drafter and drafts come back."""
