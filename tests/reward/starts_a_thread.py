"""Module whose import makes a fork unsafe."""

import threading
import time

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
