"""What programs usually import, imported once so that they need not."""

# ruff: noqa: F401
import bisect
import collections
import copy
import datetime
import decimal
import fractions
import functools
import heapq
import importlib
import io
import itertools
import json
import math
import operator
import os
import random
import re
import shutil
import string
import sys
import tempfile
import time
import traceback
import typing
