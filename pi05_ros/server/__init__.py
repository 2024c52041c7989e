"""The wire: so far the codec that openpi's clients and the action API share."""
