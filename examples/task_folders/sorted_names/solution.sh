#!/bin/bash
sort -u names.txt > sorted.txt
