"""Masks: fields that are dropped, hashed or tokenised in documents, deltas and events before anything is written."""
